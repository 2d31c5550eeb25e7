"""Parameters that a step did not use, on some replicas or on all."""

import re
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jdp
from tests import harness, rarely

# The losses of this file have parameters that only some branches use.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.* may be left out of a step by control flow"
)

BRANCHES = "abc"
WIDTH = 4
# The branch of replica r at step k is CHOICES[k][r % 4].
CHOICES = ("aaaa", "abab", "bbbb", "aabc", "cccc", "aaaa", "bcbc")


def _params(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = {"trunk": (3, WIDTH), **{name: (WIDTH, 1) for name in BRANCHES}}
    return {k: rng.normal(size=s).astype(dtype) * dtype(0.5) for k, s in shapes.items()}


def _batches(n, dtype=np.float32):
    """For each step x (4 n, 3), y (4 n, 1) and the branch of each sample (4 n,)."""
    rng = np.random.default_rng(1)
    return [
        {
            "x": rng.normal(size=(4 * n, 3)).astype(dtype),
            "y": rng.normal(size=(4 * n, 1)).astype(dtype),
            "branch": np.repeat([BRANCHES.index(row[r % 4]) for r in range(n)], 4),
        }
        for row in CHOICES
    ]


def _loss(params, batch):
    h = jnp.tanh(batch["x"] @ params["trunk"])
    heads = [lambda h, name=name: h @ params[name] for name in BRANCHES]
    prediction = lax.switch(batch["branch"][0], heads, h)
    return ((prediction - batch["y"]) ** 2).mean()


def _loss_of(branch, params, batch):
    h = jnp.tanh(batch["x"] @ params["trunk"])
    return ((h @ params[branch] - batch["y"]) ** 2).mean()


def _train_alone(params, batches, n, tx):
    """One device; a parameter without a gradient on any replica keeps its state."""
    states = {name: tx.init(p) for name, p in params.items()}
    for k, batch in enumerate(batches):
        branches = [CHOICES[k][r % 4] for r in range(n)]
        parts = [
            jax.tree.map(lambda x, r=r: x[4 * r : 4 * (r + 1)], batch) for r in range(n)
        ]
        grads = [
            jax.grad(_loss_of, argnums=1)(branch, params, part)
            for branch, part in zip(branches, parts, strict=True)
        ]
        mean = jax.tree.map(lambda *gs: sum(gs) / n, *grads)
        for name in {"trunk", *branches}:
            update, states[name] = tx.update(mean[name], states[name], params[name])
            params = params | {name: params[name] + update}
    return params, states


@pytest.mark.parametrize("n", rarely.cases([2, 4, 8], often=(4,)))
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_replicas_with_branches_of_their_own_train_as_one_device(n, optimizer):
    tx = {
        "momentum": optax.sgd(0.05, momentum=0.9),
        "adamw": optax.adamw(0.01, weight_decay=0.1),
    }[optimizer]
    wrapped = jdp.skip_unused(tx)

    @jdp.data_parallel(world=harness.local_world(n))
    def step(carry, batch):
        params, state = carry
        grad_fn = jdp.value_and_grad(_loss, find_unused=True)
        (loss, grads), used = grad_fn(params, batch)
        updates, state = wrapped.update(grads, state, params, used=used)
        return (optax.apply_updates(params, updates), state), {"used": used}

    params = _params()
    carry = params, wrapped.init(params)
    for k, batch in enumerate(_batches(n)):
        before = jax.tree.map(np.asarray, carry)
        carry, metrics = step(carry, batch)
        branches = {CHOICES[k][r % 4] for r in range(n)}
        used = {name: name in branches | {"trunk"} for name in params}
        assert jax.tree.map(bool, metrics["used"]) == used
        for name in params.keys() - branches - {"trunk"}:
            # Bit for bit: the parameter and all that the optimizer knows of it.
            kept = lambda carry, name=name: (  # noqa: E731
                carry[0][name],
                carry[1].leaf_states[f"['{name}']"],
            )
            chex.assert_trees_all_equal(kept(before), kept(carry))
    expected, states = _train_alone(params, _batches(n), n, tx)
    # Seven steps on numbers of order 1, sums of up to 32 samples in another order.
    chex.assert_trees_all_close(carry[0], expected, atol=7 * 8 * 1.2e-7, rtol=0)
    for name, state in states.items():
        counts = [x for x in jax.tree.leaves(state) if x.dtype == jnp.int32]
        mine = jax.tree.leaves(carry[1].leaf_states[f"['{name}']"])
        assert counts == [x for x in mine if x.dtype == jnp.int32]


# --- Under every transform ------------------------------------------------------


def _shard_map(check_vma):
    def compiled(fn, n):
        mapped = jax.shard_map(
            lambda p, b: fn(p, jax.tree.map(lambda x: x[0], b)),
            mesh=harness.local_world(n).mesh,
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
        return jax.jit(mapped)

    return compiled


def _pmap(fn, n):
    mapped = jax.pmap(fn, "data", in_axes=(None, 0), devices=jax.devices()[:n])
    return lambda *args: jax.tree.map(lambda x: x[0], mapped(*args))


def _vmap(fn, n):
    mapped = jax.vmap(fn, in_axes=(None, 0), axis_name="data", axis_size=n)
    return lambda *args: jax.tree.map(lambda x: x[0], mapped(*args))


def _as_arrays(used):
    return jax.tree.map(jnp.asarray, used)


@pytest.mark.parametrize(
    "run",
    [_shard_map(True), _shard_map(False), _pmap],
    ids=["shard_map", "unchecked", "pmap"],
)
@pytest.mark.parametrize("packing", ["flat", "tuple"])
@pytest.mark.parametrize("n", rarely.cases([1, 2, 4, 8], often=(4,)))
def test_the_mask_is_that_of_all_replicas(run, packing, n):
    def fn(params, batch):
        grad_fn = jdp.value_and_grad(_loss, find_unused=True, packing=packing)
        (loss, grads), used = grad_fn(params, batch)
        return loss, grads, _as_arrays(used)

    found_by, plain_by = (
        run(f, n) for f in (fn, jdp.value_and_grad(_loss, packing=packing))
    )
    for k, batch in enumerate(_batches(n)):
        split = jax.tree.map(lambda x: x.reshape(n, 4, *x.shape[1:]), batch)
        loss, grads, used = found_by(_params(), split)
        branches = {CHOICES[k][r % 4] for r in range(n)}
        assert {name for name in used if used[name]} == branches | {"trunk"}
        chex.assert_trees_all_equal((loss, grads), plain_by(_params(), split))


def test_under_vmap_a_batched_condition_runs_both_branches():
    # vmap turns the condition into a selection: every branch runs, and is used.
    def fn(params, batch):
        (loss, _), used = jdp.value_and_grad(_loss, find_unused=True)(params, batch)
        return loss, _as_arrays(used)

    split = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), _batches(2)[0])
    loss, used = _vmap(fn, 2)(_params(), split)
    assert used["trunk"] and used["a"]
    plain, _ = _vmap(jdp.value_and_grad(_loss), 2)(_params(), split)
    assert loss == plain


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32])
def test_the_mask_survives_every_dtype(dtype):
    def fn(params, batch):
        _, used = jdp.value_and_grad(_loss, find_unused=True)(params, batch)
        return _as_arrays(used)

    n = 8
    batch = _batches(n, dtype)[3]
    split = jax.tree.map(lambda x: x.reshape(n, 4, *x.shape[1:]), batch)
    used = _shard_map(True)(fn, n)(_params(dtype), split)
    assert all(used.values())  # `c` is used by 2 of 8 replicas.


def test_local_masks_are_united_when_the_user_synchronises():
    def fn(params, batch):
        grad_fn = jdp.local_gradients(_loss, find_unused=True)
        (_, grads), used = grad_fn(params, batch)
        synced, everywhere = jdp.sync_gradients(grads, used=used)
        assert everywhere["trunk"] is True
        ours = jdp.average(_as_arrays(used))
        return synced, _as_arrays(everywhere), ours

    n = 4
    batch = _batches(n)[3]
    split = jax.tree.map(lambda x: x.reshape(n, 4, *x.shape[1:]), batch)
    synced, everywhere, ours = _shard_map(True)(fn, n)(_params(), split)
    assert {k: float(v) for k, v in ours.items()} == {
        "trunk": 1.0,
        "a": 0.5,
        "b": 0.25,
        "c": 0.25,
    }
    assert all(everywhere.values())
    expected = _shard_map(True)(jdp.value_and_grad(_loss), n)(_params(), split)[1]
    chex.assert_trees_all_equal(synced, expected)


def test_the_optimizer_unites_local_masks():
    tx = jdp.distributed_optimizer(jdp.skip_unused(optax.adam(0.01)))

    @jdp.data_parallel(world=harness.local_world(2))
    def step(carry, batch):
        params, state = carry
        grad_fn = jdp.local_gradients(_loss, find_unused=True)
        (loss, grads), used = grad_fn(params, batch)
        updates, state = tx.update(grads, state, params, used=used)
        return (optax.apply_updates(params, updates), state), {}

    params = _params()
    batch = _batches(2)[1]  # a on one replica, b on the other
    (after, _), _ = step((params, tx.init(params)), batch)
    moved = {k for k in params if not np.array_equal(after[k], params[k])}
    assert moved == {"trunk", "a", "b"}


@pytest.mark.parametrize("rule", ["custom_vjp", "custom_jvp"])
def test_custom_derivatives_that_decide_keep_their_types(rule):
    def mixture(x, a, b):
        return lax.cond(x.sum() > 0, lambda: x @ a, lambda: x @ b)

    def derivative(x, a, b, dx, da, db):
        return lax.cond(x.sum() > 0, lambda: dx @ a + x @ da, lambda: dx @ b + x @ db)

    if rule == "custom_jvp":
        mixture = jax.custom_jvp(mixture)
        mixture.defjvp(lambda p, t: (mixture(*p), derivative(*p, *t)))
    else:
        mixture = jax.custom_vjp(mixture)

        def backward(kept, g):
            x, a, b = kept
            return lax.cond(
                x.sum() > 0,
                lambda: (g @ a.T, x.T @ g, jnp.zeros_like(x.T @ g)),
                lambda: (g @ b.T, jnp.zeros_like(x.T @ g), x.T @ g),
            )

        mixture.defvjp(lambda *args: (mixture(*args), args), backward)

    def loss(params, x):
        return (mixture(x, params["a"], params["b"]) ** 2).mean()

    def fn(params, x):
        (value, grads), used = jdp.value_and_grad(loss, find_unused=True)(params, x)
        return value, grads, _as_arrays(used)

    params = {k: np.eye(3, dtype=np.float32) for k in "ab"}
    x = np.ones((2, 4, 3), np.float32)
    compiled = _shard_map(True)(fn, 2)
    for signs, expected in {(1, 1): "a", (-1, -1): "b", (1, -1): "ab"}.items():
        scaled = x * np.array(signs, np.float32)[:, None, None]
        _, grads, used = compiled(params, scaled)
        assert {name for name in used if used[name]} == set(expected)
        assert {name for name in grads if grads[name].any()} == set(expected)


# --- What it costs ----------------------------------------------------------------


def _deep_loss(params, x):
    """A loop in which conditions decide, and a loop within it."""

    def turn(h, w):
        h = lax.cond(h.sum() > 0, lambda: jnp.tanh(h @ w), lambda: h @ params["v"])
        h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ params["u"]), None), h, length=3)
        return h, None

    h, _ = lax.scan(turn, x, params["w"])
    return (h**2).mean()


def _deep_params():
    rng = np.random.default_rng(0)
    shapes = {"w": (5, 32, 32), "v": (32, 32), "u": (32, 32)}
    return {k: rng.normal(size=s).astype(np.float32) * 0.3 for k, s in shapes.items()}


def _compiled(find_unused):
    @jdp.data_parallel(world=harness.local_world(4))
    def step(params, x):
        grad_fn = jdp.value_and_grad(_deep_loss, find_unused=find_unused)
        out = grad_fn(params, x)
        (loss, grads), used = out if find_unused else (out, {})
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, (loss, used)

    return step.lower(_deep_params(), np.ones((16, 32), np.float32)).compile()


@pytest.mark.filterwarnings("ignore:.*may be left out of a step")
def test_the_model_is_run_once_loops_included():
    plain, found = _compiled(False), _compiled(True)
    flops = [c.cost_analysis()["flops"] for c in (plain, found)]
    # A multiplication of the model alone is 2 * 4 * 32 * 32 = 8192.
    assert flops[1] - flops[0] < 200
    loops = [c.as_text().count(" while(") for c in (plain, found)]
    assert loops[0] == loops[1]
    dots = [c.as_text().count(" dot(") for c in (plain, found)]
    assert dots[0] == dots[1]


@pytest.mark.filterwarnings("ignore:.*may be left out of a step")
def test_no_collective_is_added():
    counts = [_compiled(f).as_text().count(" all-reduce(") for f in (False, True)]
    assert counts == [1, 1]


def test_a_static_mask_changes_nothing_in_the_program():
    def step(find_unused):
        def fn(params, batch):
            grad_fn = jdp.value_and_grad(harness.oracle_loss, find_unused=find_unused)
            out = grad_fn(params, batch)
            loss, grads = out[0] if find_unused else out
            return jax.tree.map(lambda p, g: p - g, params, grads), loss

        (batch,) = harness.oracle_batches(1)
        step = jdp.data_parallel(fn, world=harness.local_world(2))
        return step.lower(harness.oracle_params(), batch).as_text()

    assert step(True) == step(False)


# --- Left out at times ------------------------------------------------------------


def _branch_loss(params, x):
    return lax.cond(
        x.sum() > 0, lambda: x @ params["a"], lambda: x @ params["b"]
    ).mean()


def _branch_params():
    return {name: np.ones((3, 2), np.float32) for name in "ab"}


LEFT_OUT = r"2 of 2 parameters may be left out of a step by control flow: `\['a'\]`, "


def _take(call, params, x):
    """Takes gradients with one of the functions that do; none is asked what is used."""
    if call == "accumulate_gradients":
        return jdp.accumulate_gradients(_branch_loss, 2)(params, x)[1]
    if call == "both":  # one of two uses asks.
        jdp.value_and_grad(_branch_loss, find_unused=True)(params, x)
    return getattr(jdp, "value_and_grad" if call == "both" else call)(_branch_loss)(
        params, x
    )[1]


@pytest.mark.parametrize(
    "call", ["value_and_grad", "local_gradients", "accumulate_gradients", "both"]
)
def test_what_control_flow_may_leave_out_is_named_once(call):
    @jdp.data_parallel(world=harness.local_world(2))
    def step(params, x):
        grads = _take(call, params, x)
        return params, {"norm": sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))}

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        params = _branch_params()
        for size in (4, 4, 8):  # the last one is traced again.
            params, _ = step(params, np.ones((size, 3), np.float32))
    texts = [str(w.message) for w in found]
    assert len(texts) == (0 if call == "both" else 1), texts
    assert all(re.match(LEFT_OUT, text) for text in texts)


def test_outside_of_a_step_it_is_named_too():
    with pytest.warns(UserWarning, match=LEFT_OUT):
        jax.shard_map(
            jdp.value_and_grad(_branch_loss),
            mesh=harness.local_world(2).mesh,
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
        )(_branch_params(), np.ones((4, 3), np.float32))


# --- Never used -------------------------------------------------------------------


def _partial_loss(params, x):
    h = x @ params["a"] + lax.stop_gradient(params["frozen"]["w"])
    return (h**2).mean()


def _partial_params():
    return {
        "a": np.ones((3, 2), np.float32),
        "frozen": {"w": np.ones(2, np.float32)},
        "spare": np.ones(7, np.float32),
    }


def test_what_can_never_receive_a_gradient_is_named_once():
    @jdp.data_parallel(world=harness.local_world(2), donate_state=False)
    def step(params, x):
        loss, grads = jdp.value_and_grad(_partial_loss)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    params = _partial_params()
    with pytest.warns(UserWarning) as caught:
        for size in (4, 4, 8):  # another size is traced again.
            step(params, np.ones((size, 3), np.float32))
    (warning,) = caught
    assert "2 of 3 parameters can never" in str(warning.message)
    assert "`['frozen']['w']`, `['spare']`" in str(warning.message)


def test_outside_of_a_decorated_step_it_is_named_too():
    with pytest.warns(UserWarning, match=r"`\['frozen'\]\['w'\]`"):
        _shard_map(True)(jdp.value_and_grad(_partial_loss), 2)(
            _partial_params(), np.ones((2, 4, 3), np.float32)
        )


@pytest.mark.filterwarnings("ignore:.*can never receive:UserWarning")
def test_what_can_never_receive_a_gradient_is_not_sent():
    @jdp.data_parallel(world=harness.local_world(2))
    def step(params, x):
        (loss, grads), used = jdp.value_and_grad(_partial_loss, find_unused=True)(
            params, x
        )
        assert used == {"a": True, "frozen": {"w": False}, "spare": False}
        return params, grads

    args = _partial_params(), np.ones((4, 3), np.float32)
    (line,) = [
        s
        for s in step.lower(*args).compile().as_text().splitlines()
        if " all-reduce(" in s
    ]
    assert "f32[7]" in line  # a (3, 2), and the loss.
    _, grads = step(*args)
    assert not grads["spare"].any() and not grads["frozen"]["w"].any()
    assert grads["a"].all()


# --- Bad input ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "used,error,message",
    [
        ({"a": True}, ValueError, r"`\['b'\]` is only in the gradients"),
        ({"a": True, "c": True}, ValueError, r"`\['c'\]` in `used`, `\['b'\]` in the"),
        ({"a": True, "b": 1.0}, TypeError, r"has 1.0 for `\['b'\]`"),
        ({"a": True, "b": np.ones(2, bool)}, TypeError, r"bool of shape \(2,\) for"),
    ],
)
def test_a_mask_that_does_not_fit_is_named(used, error, message):
    grads = {"a": np.ones((2, 2), np.float32), "b": np.ones((2, 2), np.float32)}
    with pytest.raises(error, match=message):
        jax.vmap(lambda g: jdp.sync_gradients(g, used=used), axis_name="data")(grads)


def test_a_reduction_in_a_branch_that_replicas_choose_is_refused():
    def loss(params, x):
        def with_sync():
            return x @ jdp.sync_in_backward(params["a"])

        return lax.cond(x.sum() > 0, with_sync, lambda: x[:, :2]).sum()

    with pytest.raises(ValueError, match="in a branch of a `cond` that replicas"):
        _shard_map(True)(jdp.value_and_grad(loss), 2)(
            _partial_params(), np.ones((2, 4, 3), np.float32)
        )


# --- The numbers of torch -------------------------------------------------------------


def _torch_unused_loss(params, batch):
    x, y, branch = batch
    h = jnp.tanh(x @ params["trunk"]["W"].T + params["trunk"]["b"])
    heads = [
        lambda h, head=params[name]: h @ head["W"].T + head["b"] for name in ("A", "B")
    ]
    return ((lax.switch(branch[0], heads, h) - y) ** 2).mean()


def _train_as_torch():
    case = np.load(harness.REFERENCE / "torch_2_13_unused.npz")
    world = jdp.init()
    names = [f"{part}.{leaf}" for part in ("trunk", "A", "B") for leaf in ("W", "b")]
    params = {part: {} for part in ("trunk", "A", "B")}
    for name in names:
        part, leaf = name.split(".")
        params[part][leaf] = case[f"init.{name}"]
    tx = jdp.skip_unused(optax.sgd(0.05, momentum=0.9))

    @jdp.data_parallel
    def step(carry, batch):
        params, state = carry
        grad_fn = jdp.value_and_grad(_torch_unused_loss, find_unused=True)
        (loss, grads), used = grad_fn(params, batch)
        local, _ = jdp.local_gradients(_torch_unused_loss)(params, batch)
        updates, state = tx.update(grads, state, params, used=used)
        ranks = lax.axis_index("data")
        metrics = {
            "grads": grads,
            "used": used,
            "losses": 2 * local * jnp.array([1 - ranks, ranks]),
        }
        return (optax.apply_updates(params, updates), state), metrics

    def flat(tree):
        leaves = [tree[p][n] for p in ("trunk", "A", "B") for n in ("W", "b")]
        return np.concatenate([np.ravel(x.addressable_data(0)) for x in leaves])

    def buffers(state):
        found = {}
        for path, leaf_state in state.leaf_states.items():
            (array,) = [x for x in jax.tree.leaves(leaf_state) if x.ndim or x.size]
            found[path] = array
        return np.concatenate(
            [
                np.ravel(found[f"['{p}']['{n}']"].addressable_data(0))
                for p in ("trunk", "A", "B")
                for n in ("W", "b")
            ]
        )

    carry = jdp.replicate(world, (params, tx.init(params)))
    found = {"traj": [flat(carry[0])], "grads": [], "used": [], "buf": [], "losses": []}
    branches = ["AA", "AA", "AB", "AA", "BB", "AA", "BA", "AA"]
    rank = world.process_index
    for k, row in enumerate(branches):
        branch = np.full(4, "AB".index(row[rank]))
        carry, metrics = step(carry, (case["X"][rank, k], case["Y"][rank, k], branch))
        found["traj"].append(flat(carry[0]))
        found["grads"].append(flat(metrics["grads"]))
        found["buf"].append(buffers(carry[1]))
        found["losses"].append(np.asarray(metrics["losses"]))
        found["used"].append(
            [
                bool(metrics["used"][p][n])
                for p in ("trunk", "A", "B")
                for n in ("W", "b")
            ]
        )
    jdp.check_replicas(carry, world=world)
    return {key: np.asarray(value) for key, value in found.items()}


@pytest.mark.multiprocess
def test_two_processes_leave_unused_parameters_alone_as_torch_does():
    case = np.load(harness.REFERENCE / "torch_2_13_unused.npz")
    sizes = [80, 8, 8, 1, 8, 1]
    for found in harness.run_checked(_train_as_torch, 2):
        is_none = case["none.momentum.grad_is_none"]
        np.testing.assert_array_equal(found["used"], ~is_none)
        np.testing.assert_allclose(
            found["traj"], case["none.momentum.traj"], atol=2e-6, rtol=0
        )
        np.testing.assert_allclose(
            found["losses"].T, case["none.momentum.losses"], atol=2e-6, rtol=0
        )
        gone = np.repeat(is_none, sizes, axis=1)
        np.testing.assert_allclose(
            np.where(gone, 0, found["grads"]),
            np.where(gone, 0, case["none.momentum.grads"]),
            atol=2e-6,
            rtol=0,
        )
        # Where torch has no momentum yet, ours is the zero it began with.
        has_state = np.repeat(case["none.momentum.has_state"], sizes, axis=1)
        np.testing.assert_allclose(
            found["buf"],
            np.where(has_state, case["none.momentum.state_buf"], 0),
            atol=2e-6,
            rtol=0,
        )
        # Bit for bit while unused: the steps before B is used for the first time.
        for k in np.flatnonzero(is_none[:, 4]):
            b = slice(97, 106)
            np.testing.assert_array_equal(found["traj"][k + 1][b], found["traj"][k][b])


@jax.tree_util.register_pytree_with_keys_class
class _Matrix:
    """As parameters that check, or convert, their fields whenever they are made."""

    def __init__(self, w, is_checked):
        assert not is_checked or jnp.ndim(w) == 2, "w must be a matrix"
        self.w = w if is_checked else jnp.asarray(w, jnp.float32)
        self.is_checked = is_checked

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("w"), self.w)], self.is_checked

    @classmethod
    def tree_unflatten(cls, is_checked, children):
        return cls(*children, is_checked)


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_class_that_holds_no_booleans_is_named(is_checked):
    params = {"a": (_Matrix(np.ones((3, 2), np.float32), is_checked),)}
    path = ".w" if is_checked else "[0]"  # It takes nothing but arrays.
    assert path in jdp.plan_buckets(params).describe()
    cause = "AssertionError: w must be a matrix" if is_checked else "it made float32"
    with pytest.raises(TypeError, match=f"`_Matrix` does not hold booleans: {cause}"):
        jdp.used_parameters(lambda p: p["a"][0].w.sum(), params)
