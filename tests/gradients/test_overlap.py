"""Buckets can be sent while the backward pass goes on: shown on compiled programs."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdp
from tests import harness

DEPTH = 5
WIDTH = 16
MATRIX_BYTES = WIDTH * WIDTH * 4


class Program:
    """The dataflow of a compiled program, from its text."""

    def __init__(self, text):
        self.operands = {}  # by computation and instruction.
        self.lines = {}
        computation = ""
        for line in text.splitlines():
            header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if header:
                computation = header.group(2)
                if header.group(1):
                    self.entry = computation
                continue
            found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$", line)
            if not found:
                continue
            name, rest = found.groups()
            rest = rest.split(", metadata=")[0]
            self.operands[computation, name] = re.findall(r"%([\w.\-]+)", rest)
            self.lines[computation, name] = rest

    def names(self, word):
        """Instructions of the entry computation, in the order of the text."""
        return [n for c, n in self.lines if c == self.entry and self._is(c, n, word)]

    def ancestors(self, name):
        """What must run before an instruction of the entry computation, inclusive."""
        found, left = set(), [name]
        while left:
            name = left.pop()
            if name in found or (self.entry, name) not in self.operands:
                continue
            found.add(name)
            left += self.operands[self.entry, name]
        return found

    def count(self, names, word):
        """How many instructions of a kind run, those in called computations too."""
        return sum(self._count(self.entry, name, word) for name in names)

    def _is(self, computation, name, word):
        return f" {word}(" in self.lines[computation, name]

    def _count(self, computation, name, word):
        total = int(self._is(computation, name, word))
        called = re.findall(
            r"(?:calls|body|to_apply)=%?([\w.\-]+)", self.lines[computation, name]
        )
        for other in called:
            total += sum(
                self._count(other, n, word) for c, n in self.lines if c == other
            )
        return total


def _names():
    """Layers whose names do not come in the order in which they run."""
    return [f"layer{(3 * k) % DEPTH}" for k in range(DEPTH)]


def _params():
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.3
        for name in _names()
    }


def _loss(params, x):
    for name in _names():
        x = jnp.tanh(x @ params[name])
    return (x**2).mean()


def _step(plan=None, all_reduce=None):
    def step(params, x):
        loss, grads = jdp.value_and_grad(_loss, plan=plan, all_reduce=all_reduce)(
            params, x
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return jdp.data_parallel(step, world=harness.local_world(4), donate_state=False)


X = np.ones((8, WIDTH), np.float32)


def _plan(layers_of_a_bucket):
    order = jdp.gradient_order(_loss, _params(), X)
    size = layers_of_a_bucket * MATRIX_BYTES
    return jdp.plan_buckets(
        _params(), order=order, bucket_bytes=size, first_bucket_bytes=size
    )


def _program(step, *args):
    return Program(step.lower(*args).compile().as_text())


@pytest.mark.parametrize("layers_of_a_bucket", [1, 2])
def test_a_bucket_waits_for_no_more_than_its_own_gradients(layers_of_a_bucket):
    plan = _plan(layers_of_a_bucket)
    program = _program(_step(plan), _params(), X)
    sent = program.names("all-reduce")
    assert len(sent) == len(plan.buckets)  # not merged back into one.
    waits = {}
    for name in sent:
        ancestors = program.ancestors(name)
        assert not (ancestors & set(sent)) - {name}  # nor one after the other.
        waits[name] = program.count(ancestors, "dot")
    # The forward pass, the backward pass down to the bucket's last layer, and the
    # gradients of its own layers: none of an earlier or a later bucket.
    own = [len(bucket) for bucket in plan.buckets]
    reached = np.cumsum(own)
    expected = [DEPTH + (k - 1) + n for k, n in zip(reached, own, strict=True)]
    assert sorted(waits.values()) == expected
    everything = {name for c, name in program.lines if c == program.entry}
    assert program.count(everything, "dot") == DEPTH + (DEPTH - 1) + DEPTH


def test_the_order_is_that_of_the_program_with_no_option_set():
    order = [f"['{name}']" for name in reversed(_names())]
    (made,) = jdp.describe(_step(), _params(), X).synchronizations
    assert [leaf.path for bucket in made.buckets for leaf in bucket.leaves] == order
    # Another one than that of the leaves, or the test would show nothing.
    assert order != sorted(order, reverse=True)


def test_no_iteration_is_needed_to_learn_the_order():
    traces = []

    def all_reduce(x, axis_name):
        traces.append(x.shape)
        return lax.psum(x, axis_name)

    step = _step(_plan(1), all_reduce=all_reduce)
    state = _params()
    for _ in range(3):
        state, _ = step(state, X)
    assert len(traces) == DEPTH  # traced once, and never again.


# --- Layers that are stacked --------------------------------------------------------


def _stacked_params():
    rng = np.random.default_rng(0)
    return {
        "layers": {
            "w": rng.normal(size=(DEPTH, WIDTH, WIDTH)).astype(np.float32) * 0.3,
            "b": np.zeros((DEPTH, WIDTH), np.float32),
        },
        "head": rng.normal(size=WIDTH).astype(np.float32),
    }


def _stacked_loss(sync, params, x):
    def layer(h, p):
        p = sync(p)
        return jnp.tanh(h @ p["w"] + p["b"]), None

    h, _ = lax.scan(layer, x, params["layers"])
    return ((h @ params["head"]) ** 2).mean()


def _stacked_step(sync, check_vma=True):
    def step(params, x):
        loss_fn = functools.partial(_stacked_loss, sync)
        loss, grads = jdp.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return jdp.data_parallel(
        step,
        world=harness.local_world(4),
        donate_state=False,
        check_vma=check_vma,
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_loop_each_layer_is_reduced_as_it_comes(check_vma):
    step = _stacked_step(jdp.sync_in_backward, check_vma)
    program = _program(step, _stacked_params(), X)
    inside = [
        (c, n)
        for c, n in program.lines
        if c != program.entry and program._is(c, n, "all-reduce")
    ]
    # One of the loop's body, with the slice of one layer.
    sizes = [program.lines[place].split("[")[1].split("]")[0] for place in inside]
    assert sizes == [str(WIDTH * WIDTH + WIDTH)]
    # After it the head alone; unchecked, the loss is averaged as a metric once more.
    outside = [program.lines[program.entry, n] for n in program.names("all-reduce")]
    assert f"f32[{WIDTH + 1}]" in outside[0]
    assert not any(str(DEPTH * WIDTH * WIDTH) in line for line in outside)


@pytest.mark.parametrize("check_vma", [True, False])
def test_reducing_in_the_loop_gives_the_same(check_vma):
    params = _stacked_params()
    x = np.random.default_rng(1).normal(size=(8, WIDTH)).astype(np.float32)
    inside = _stacked_step(jdp.sync_in_backward, check_vma)(params, x)
    after = _stacked_step(lambda p: p, check_vma)(params, x)
    chex.assert_trees_all_close(inside, after, atol=1e-7, rtol=0)


def test_a_parameter_that_is_used_elsewhere_too_is_reduced_again():
    def loss_fn(sync, params, x):
        tied = sum(w.sum() for w in params["layers"]["w"])
        return _stacked_loss(sync, params, x) + 0.01 * tied * x.mean()

    def run(sync):
        def step(params, x):
            loss, grads = jdp.value_and_grad(functools.partial(loss_fn, sync))(
                params, x
            )
            return params, grads

        step = jdp.data_parallel(step, world=harness.local_world(4))
        return step(_stacked_params(), x)[1]

    x = np.random.default_rng(1).normal(size=(8, WIDTH)).astype(np.float32)
    # Numbers up to 4, whose two parts are added before or after the mean.
    chex.assert_trees_all_close(
        run(jdp.sync_in_backward), run(lambda p: p), atol=8 * 1.2e-7, rtol=0
    )


def test_under_pmap_and_vmap_it_reduces_too():
    x = np.random.default_rng(1).normal(size=(4, 2, WIDTH)).astype(np.float32)

    def grads(sync, transform):
        fn = jdp.value_and_grad(functools.partial(_stacked_loss, sync))
        mapped = transform(fn, in_axes=(None, 0), axis_name="data")
        return mapped(_stacked_params(), x)[1]

    pmap = functools.partial(jax.pmap, devices=jax.devices()[:4])
    for transform in (pmap, jax.vmap):
        inside = grads(jdp.sync_in_backward, transform)
        after = grads(lambda p: p, transform)
        chex.assert_trees_all_close(inside, after, atol=1e-7, rtol=0)


def test_a_model_of_blocks_may_reduce_in_backward_without_a_loop():
    def loss_fn(params, x):
        for name in _names():
            x = jnp.tanh(x @ jdp.sync_in_backward(params[name]))
        return (x**2).mean()

    def step(params, x):
        return params, jdp.value_and_grad(loss_fn)(params, x)

    world = harness.local_world(4)
    found = jdp.data_parallel(step, world=world)(_params(), X)[1]

    def plain(params, x):
        return params, jdp.value_and_grad(_loss)(params, x)

    expected = jdp.data_parallel(plain, world=world)(_params(), X)[1]
    chex.assert_trees_all_close(found, expected, atol=1e-7, rtol=0)


def test_outside_of_an_axis_it_says_so():
    with pytest.raises(ValueError, match=r"`axis_name='data'` is not bound"):
        jax.grad(lambda p: jdp.sync_in_backward(p).sum())(jnp.ones(2))


@pytest.mark.parametrize("inner", ["data", "node", ("data", "node")])
def test_reducing_over_other_axes_than_the_rest_is_refused(inner):
    axes = ("node", "data")

    def fn(inner, params, x):
        loss_fn = functools.partial(
            _stacked_loss, functools.partial(jdp.sync_in_backward, axis_name=inner)
        )
        return params, jdp.value_and_grad(loss_fn, axis_name=axes)(params, x)

    def run(inner):
        world = harness.local_world(4, axes, 2)
        step = jdp.data_parallel(functools.partial(fn, inner), world=world)
        return step(_stacked_params(), X)[1]

    with pytest.raises(
        ValueError, match="averaged in different ways: .*over_node_and_data"
    ):
        run(inner)
    plain = jax.value_and_grad(functools.partial(_stacked_loss, lambda p: p))
    chex.assert_trees_all_close(run(axes), plain(_stacked_params(), X), atol=1e-6)
