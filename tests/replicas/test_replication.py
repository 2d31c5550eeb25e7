"""What differs between processes is named on all of them: in-memory processes."""

import collections
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp.backward import captured
from jdp.replicas import host_copies
from tests import harness, rarely


def _compare(trees, fn=lambda tree: jax.tree.leaves(tree)):
    def run(world):
        tree = trees[min(world.process_index, len(trees) - 1)]
        return jdp.check_same_program(fn, tree, world=world)

    return harness.run_threads(run, 3)


def _tree(**leaves):
    return {name: np.zeros(shape, np.float32) for name, shape in leaves.items()}


def test_equal_trees_and_programs_pass():
    assert _compare([_tree(a=2, b=(3, 1))]) == [None] * 3


@pytest.mark.parametrize(
    "ours,theirs,expected",
    [
        (
            _tree(a=2, b=3),
            _tree(a=2),
            "Process 0 has 2 leaves, process 1 has 1. Only process 0 has "
            "`args[0]['b']` (float32[3])",
        ),
        (
            _tree(a=2, c=3),
            _tree(a=2, b=1, c=3),
            "Process 0 has 2 leaves, process 1 has 3. Only process 1 has "
            "`args[0]['b']` (float32[1])",
        ),
        (
            _tree(w=(4, 8)),
            _tree(w=(5, 8)),
            "`args[0]['w']` is not the same on all processes: float32[4,8] on process "
            "0, float32[5,8] on process 1",
        ),
        (
            {"w": np.zeros(2, np.float32)},
            {"w": np.zeros(2, np.float16)},
            "float32[2] on process 0, float16[2] on process 1",
        ),
        (
            _tree(down=3, up=3),
            _tree(up=3, upper=3),
            "Only process 0 has `args[0]['down']` (float32[3]), only process 1 has "
            "`args[0]['upper']` (float32[3])",
        ),
    ],
    ids=["fewer", "other names", "other shape", "other dtype", "other order"],
)
def test_a_difference_is_named_on_every_process(ours, theirs, expected):
    for error in _compare([ours, theirs]):
        assert isinstance(error, RuntimeError)
        assert expected in str(error)


def test_a_weak_type_of_one_process_is_named_by_its_leaf():
    rates = [{"rate": 0.5}, {"rate": np.float32(0.5)}]
    for error in _compare(rates, lambda tree: tree["rate"] * 2):
        assert str(error) == (
            "`args[0]['rate']` is not the same on all processes: float32[] with "
            "weak_type on process 0, float32[] on process 1. A Python number "
            "has a weak_type in JAX, which compiles another program for it. Pass an "
            "array of one dtype in every process, such as `jnp.float32(x)`."
        )
    assert _compare([{"rate": 0.5}], lambda tree: tree["rate"] * 2) == [None] * 3
    # The bits are all that `check_replicas` compares.
    assert _check(lambda p: {"x": 0.5 if p else np.float32(0.5)}) == [None] * 3


def test_another_order_of_the_same_paths_is_named():
    def run(world):
        names = ["a", "b"] if world.process_index == 0 else ["b", "a"]
        tree = collections.OrderedDict((n, np.ones(2, np.float32)) for n in names)
        jdp.check_same_program(lambda tree: tree["a"], tree, world=world)

    for error in harness.run_threads(run, 2):
        assert "`args[0]['a']` on process 0 is in the place of `args[0]['b']`" in str(
            error
        )


def test_the_same_shapes_in_another_order_are_another_program():
    def run(world):
        order = [0, 1] if world.process_index == 0 else [1, 0]

        def fn(weights, x):
            first, second = (weights[i] for i in order)
            return jnp.tanh(x @ first) @ second

        weights = [np.ones((3, 3), np.float32)] * 2
        jdp.check_same_program(fn, weights, np.ones(3, np.float32), world=world)

    for error in harness.run_threads(run, 2):
        assert "traced different programs" in str(error)
        assert "process 0:" in str(error) and "process 1:" in str(error)


def test_a_different_constant_is_shown_from_both():
    def run(world):
        rate = 0.1 * (1 + world.process_index)
        jdp.check_same_program(lambda x: x * rate, np.float32(1), world=world)

    for error in harness.run_threads(run, 2):
        assert "mul a 0.1" in str(error) and "mul a 0.2" in str(error)


def _jit(value):
    return lambda x: jax.jit(lambda x: x + value)(x)


def _scan(value):
    return lambda x: jax.lax.scan(lambda c, _: (c + value, None), x, None, length=2)[0]


def _custom_vjp(value):
    fn = jax.custom_vjp(lambda x: x)
    fn.defvjp(lambda x: (x, None), lambda _, ct: (ct * value,))
    return jax.grad(lambda x: fn(x).sum())


CAPTURING = {
    "plainly": lambda value: lambda x: x * value,
    "jit": _jit,
    "scan": _scan,
    "cond": lambda value: (
        lambda x: jax.lax.cond(x[0] > 0, lambda: x + value, lambda: x)
    ),
    "while": lambda value: (
        lambda x: jax.lax.while_loop(lambda c: (c < value).all(), lambda c: c + 1, x)
    ),
    "custom_vjp": _custom_vjp,
    "remat": lambda value: jax.checkpoint(lambda x: jnp.sin(x * value)),
    "an index": lambda value: lambda x: x[value.astype(int)],
    "in a jit in a scan": lambda value: lambda x: jax.lax.map(_jit(value), x[None]),
}


@pytest.mark.parametrize(
    "make",
    rarely.cases([np.array, jnp.array], often=(jnp.array,)),
    ids=["numpy", "jax"],
)
@pytest.mark.parametrize("way", CAPTURING)
def test_a_captured_array_that_differs_is_named(way, make):
    def run(world):
        value = make([0.0, 1.0, 1 + (world.process_index == 2)], np.float32)
        jdp.check_same_program(CAPTURING[way](value), np.ones(3), world=world)

    for error in harness.run_threads(run, 3):
        text = str(error)
        assert "captures, from outside of the function that is traced" in text
        assert "[3] (test_replication.py:" in text
        assert ": at (2,) " in text and " on process 2. Each process" in text
        assert "`replicated_argnames`" in text


@pytest.mark.parametrize(
    "make,spec",
    [
        (lambda p: jax.random.key(p), "key<fry>[]"),
        (lambda p: jnp.float32(p), "float32[]"),
        (lambda p: np.zeros((2, 1), "bfloat16") + p, "bfloat16[2,1]"),
        (lambda p: np.array([p == 0]), "bool[1]"),
        (lambda p: np.asfortranarray(np.eye(4, dtype=np.float32) * p), "float32[4,4]"),
    ],
)
def test_captured_arrays_of_all_kinds_are_compared(make, spec):
    def run(world, differs=True):
        value = make(world.process_index if differs else 1)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return jdp.check_same_program(
                lambda x: x + jax.random.normal(value), np.ones(2), world=world
            )
        fn = lambda x: x.sum() + value  # noqa: E731
        return jdp.check_same_program(fn, np.ones(2), world=world)

    for error in harness.run_threads(run, 2):
        assert f"all processes: {spec} (test_replication.py:" in str(error)
        assert "on process 0, " in str(error)
    assert harness.run_threads(functools.partial(run, differs=False), 2) == [None] * 2


def test_equal_arrays_in_other_places_are_another_program():
    def run(world):
        a, b = np.arange(3.0), np.ones(3)
        last = b if world.process_index else a

        def fn(x):
            return (x + a) * b - last.copy()

        jdp.check_same_program(fn, np.ones(3), world=world)

    for error in harness.run_threads(run, 2):
        assert "process 1 uses the same arrays differently from process 0." in str(
            error
        )


def test_a_captured_array_is_hashed_once(monkeypatch):
    hashed = []
    real = captured._hash_array
    monkeypatch.setattr(
        captured, "_hash_array", lambda spec, x: hashed.append(spec) or real(spec, x)
    )
    big = jnp.ones((100, 100))

    def fn(x):
        for _ in range(5):
            x = jax.jit(lambda x: x @ big)(x)
        return x + big

    found = captured.find([jax.make_jaxpr(fn)(big)])
    assert hashed == ["float32[100,100]"] and len(found.arrays) == 1


def test_addresses_of_functions_are_no_difference():
    def run(world):
        def fn(x):
            def policy(*args, **params):
                return False

            jax.debug.print("{x}", x=x)
            y = jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), np.float32), x)
            return jax.checkpoint(lambda y: y * 2, policy=policy)(y)

        jdp.check_same_program(fn, np.float32(1), world=world)

    assert harness.run_threads(run, 2) == [None, None]


def test_a_failing_trace_is_told_to_the_others():
    def run(world):
        def fn(x):
            if world.process_index == 1:
                raise KeyError("scale")
            return x

        jdp.check_same_program(fn, np.float32(1), world=world)

    first, second, third = harness.run_threads(run, 3)
    assert isinstance(second, KeyError)
    for error in (first, third):
        assert "process 1 failed: KeyError: 'scale'" in str(error)


def _check(make):
    def run(world):
        jdp.check_replicas(make(world.process_index), world=world)

    return harness.run_threads(run, 3)


def test_equal_replicas_pass():
    assert (
        _check(lambda p: {"a": np.arange(7), "empty": np.zeros((0, 2))}) == [None] * 3
    )


def test_the_first_element_that_differs_is_named_with_both_values():
    def make(process):
        w = np.arange(60_000, dtype=np.float32).reshape(300, 200)
        if process == 2:
            w[250, 3] = -1.5
            w[299, 0] = -2.5
        return {"a": np.ones(3), "w": w, "z": np.full(2, process)}

    for error in _check(make):
        assert str(error).startswith(
            "`['w']` differs between the replicas: at (250, 3) 50003.0 on process 0, "
            "-1.5 on process 2. Give all processes the same"
        )


def test_bits_count_not_values():
    zeros = [np.float32(0.0), np.float32(0.0), np.float32(-0.0)]
    for error in _check(lambda p: {"x": zeros[p]}):
        assert "`['x']` differs between the replicas: 0.0 on process 0, -0.0" in str(
            error
        )
    nans = [
        np.array([0x7FC00000 + p // 2], np.uint32).view(np.float32) for p in range(3)
    ]
    for error in _check(lambda p: {"x": nans[p]}):
        assert "nan (0x7fc00000) on process 0, nan (0x7fc00001)" in str(error)
    same_nan = np.float32(np.nan)
    assert _check(lambda p: {"x": same_nan}) == [None] * 3


def test_other_structures_are_named_before_bits():
    for error in _check(lambda p: {"x": np.zeros(2 + p // 2, np.float32)}):
        assert "float32[2] on process 0, float32[3] on process 2" in str(error)


def test_replicas_of_one_process_are_compared():
    world = harness.local_world(2)
    parts = [
        jax.device_put(np.full(3, k, np.float32), device)
        for k, device in enumerate(world.local_devices)
    ]
    bad = jax.make_array_from_single_device_arrays((3,), world.replicated, parts)
    with pytest.raises(RuntimeError, match=r"`\['w'\]` differs .* of one process"):
        jdp.check_replicas({"w": bad}, world=world)
    jdp.check_replicas({"w": jdp.replicate(world, parts[0])}, world=world)


def test_what_one_process_cannot_compare_is_told_to_the_others(monkeypatch):
    of_replicas = host_copies.of_replicas

    def copy(world, leaf, path):
        if threading.current_thread().name == "process 1":
            raise RuntimeError("devices disagree")
        return of_replicas(world, leaf, path)

    monkeypatch.setattr(host_copies, "of_replicas", copy)
    for process, error in enumerate(_check(lambda p: {"x": np.zeros(2)})):
        expected = "" if process == 1 else "process 1 failed: RuntimeError: "
        assert f"{expected}devices disagree" in str(error)


def test_what_is_split_cannot_be_compared():
    world = harness.local_world(2)
    batch = jdp.global_batch(world, {"x": np.ones(4, np.float32)})
    with pytest.raises(ValueError, match=r"`\['x'\]` is split over the replicas"):
        jdp.check_replicas(batch, world=world)


def test_keys_are_compared_by_their_data():
    for error in _check(lambda p: {"key": jax.random.key(p // 2)}):
        assert "`['key']` differs between the replicas" in str(error)
