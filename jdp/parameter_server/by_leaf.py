"""By leaf: does an optimizer update each leaf without regard to the others?"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdp.backward.flow import FlowAnalysis, Sets
from jdp.parameter_server.program_values import ProgramValues
from jdp.parameter_server.shards import Shards
from jdp.parameter_server.staleness import run_update
from jdp.types import PyTree

_NUM_STEPS = 3  # steps to compare programs over: counters first matter in the second.


class _OptimizerProgram(NamedTuple):
    """An optimizer, traced over a tree or a part of it."""

    init: Any  # params -> state.
    update: Any  # (grads, params, state) -> (updates, state).


def check_is_by_leaf(
    tx: optax.GradientTransformation, params: PyTree, plan: Shards
) -> None:
    """Checks that servers with a part of the leaves each make the same updates.

    It compares traced programs, not values. So it finds optimizers that mix leaves only
    for some gradients, such as `optax.clip_by_global_norm`, and optimizers that depend
    on the number or order of leaves, such as `optax.add_noise`.

    Raises:
      ValueError: the updates would differ.
      TypeError: servers cannot call the optimizer; see `run_update`.
    """
    if len(plan.of_server) == 1:
        return
    tx = optax.with_extra_args_support(tx)
    paths = plan.plan.leaf_paths()
    avals = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), params
    )
    whole = _trace(tx, avals)
    found = _find_mixed(whole, len(paths))
    if found is not None:
        first, second = (paths[i] for i in found)
        raise ValueError(
            f"The optimizer mixes leaves: `{first}` and `{second}`, for example, and "
            f"each of the {len(plan.of_server)} servers has only some of them. Clip by "
            "norm before `Worker.push`, take an optimizer that updates each leaf "
            "separately, or start one server."
        )
    values = ProgramValues()
    expected = _number_updates(values, whole, range(len(paths)))
    for server, shard in enumerate(plan.of_server):
        own = sorted(shard.leaves)
        part = _trace_part(tx, plan.find_parts(avals, server), server)
        for i, number in zip(own, _number_updates(values, part, own), strict=True):
            if number != expected[i]:
                raise ValueError(
                    f"The optimizer updates `{paths[i]}` differently if it has all "
                    f"{len(paths)} leaves than if it has the {len(own)} leaves of "
                    f"server {server}: it draws random numbers for one leaf after the "
                    "other, as `optax.add_noise` does, counts leaves or parameters, or "
                    "computes with the widest dtype of all leaves, as "
                    "`optax.inject_hyperparams` does. Add noise before `Worker.push`, "
                    "pass `hyperparam_dtype=jnp.float32` to `inject_hyperparams`, take "
                    "an optimizer that updates each leaf separately, or start one "
                    "server."
                )


def _trace(
    tx: optax.GradientTransformationExtraArgs, avals: PyTree
) -> _OptimizerProgram:
    def step(grads: PyTree, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        return run_update(tx, grads, state, params, jnp.int32(1))

    init = jax.make_jaxpr(tx.init)(avals)
    state = jax.eval_shape(tx.init, avals)
    update, made = jax.make_jaxpr(step, return_shape=True)(avals, avals, state)
    if jax.tree.structure(made[1]) != jax.tree.structure(state):
        raise ValueError(
            "The optimizer's state has another structure after its first update, like "
            "the state of `optax.monitor`. Several servers cannot handle that. Start "
            "one."
        )
    return _OptimizerProgram(init, update)


def _trace_part(
    tx: optax.GradientTransformationExtraArgs, avals: PyTree, server: int
) -> _OptimizerProgram:
    try:
        return _trace(tx, avals)
    except (
        AttributeError,
        TypeError,
        ValueError,
    ) as error:  # Over all leaves, tracing succeeded.
        raise ValueError(
            f"The optimizer cannot be given the leaves of server {server} alone: a "
            "mask, or another function of it, does not pass over `optax.MaskedNode`, "
            f"which stands where another server has the leaf: {error}. Use "
            "`jax.tree.map(fn, params)` there, which does, or start one server."
        ) from error


def _find_mixed(program: _OptimizerProgram, num_leaves: int) -> tuple[int, int] | None:
    """Returns two leaves that one update or part of the state depends on, if any."""
    own = [Sets(1 << i, 1 << i) for i in range(num_leaves)]
    flow = FlowAnalysis(by_value=True)
    state = flow.propagate(program.init.jaxpr, own)
    while True:
        found = flow.propagate(program.update.jaxpr, [*own, *own, *state])
        updates, after = found[: len(own)], found[len(own) :]
        # The state of the next step; it depends on at least the same leaves.
        after = [
            Sets(a.must | b.must, a.may | b.may)
            for a, b in zip(state, after, strict=True)
        ]
        mixed = [s.may | o.may for s, o in zip(updates, own, strict=True)]
        mixed += [s.may for s in after]
        for bits in mixed:
            if bits.bit_count() > 1:
                first, second = [i for i in range(len(own)) if bits >> i & 1][:2]
                return first, second
        if after == state:
            return None
        state = after


def _number_updates(
    values: ProgramValues, program: _OptimizerProgram, leaves: Sequence[int]
) -> list[tuple[int, ...]]:
    """Returns the value numbers of each leaf's updates, over some steps."""
    state = values.of_jaxpr(
        program.init, [values.number("params", 0, i) for i in leaves]
    )
    found = []
    for step in range(_NUM_STEPS):
        grads = [values.number("grads", step, i) for i in leaves]
        params = [values.number("params", step, i) for i in leaves]
        after = values.of_jaxpr(program.update, [*grads, *params, *state])
        found.append(after[: len(leaves)])
        state = after[len(leaves) :]
    return list(zip(*found, strict=True))
