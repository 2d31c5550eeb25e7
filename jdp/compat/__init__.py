"""Compat: the only code that uses private or version-dependent JAX."""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import (
    api,
    array,
    clusters,
    config,
    core,
    distributed,
    effects,
    source_info_util,
    xla_bridge,
)
from jax._src.interpreters import batching
from jax._src.interpreters import partial_eval as partial_eval_internal
from jax._src.lax import lax as lax_internal
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax._src.random import prng
from jax._src.state import types as state_types
from jax.interpreters import partial_eval

from jdp import types
from jdp.types import AxisName

# Types of arrays outside of traced functions. `isinstance(x, jax.Array)` takes ten
# times as long, since it runs a metaclass in Python.
ARRAY_TYPES = frozenset({array.ArrayImpl, prng.PRNGKeyArray})
# Returns the trace that a tracer belongs to.
trace_of = operator.attrgetter("_trace")


def without_key_type(x: Any) -> Any:
    """Returns an array, or the key data of an array of PRNG keys; traces nothing."""
    return x._base_array if isinstance(x, prng.PRNGKeyArray) else x


def as_weak(x: Any) -> Any:
    """Returns an array with a weak type, as a Python number has."""
    return lax_internal._convert_element_type(x, weak_type=True)


def is_weak(x: Any) -> bool:
    """Whether a value is weakly typed: a Python number, or an array made of one."""
    if isinstance(x, jax.Array):
        return jax.typeof(x).weak_type
    return type(x) in (int, float, complex)


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the manual mesh axes over which `x` may differ, by its type.

    The set is empty outside `shard_map`, under `check_vma=False`, `vmap` and `pmap`.
    """
    return varying_axes_of_type(jax.typeof(x))


def varying_axes_of_type(aval: Any) -> frozenset[str]:
    """Returns `varying_axes` of arrays of this type."""
    axis_type = getattr(aval, "mat", None)
    return frozenset() if axis_type is None else axis_type.varying


def cast_varying(x: Any, axis_names: Sequence[str]) -> Any:
    """Casts an array to a type that varies over `axis_names`; no data moves."""
    missing = tuple(a for a in axis_names if a not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def cast_alike(xs: Sequence[jax.Array], axis_names: Sequence[str]) -> list[jax.Array]:
    """Casts arrays to types that vary over `axis_names` and all of their own axes.

    A primitive that is bound directly requires operands that vary alike.
    """
    names = sorted(frozenset(axis_names).union(*map(varying_axes, xs)))
    return [cast_varying(x, names) for x in xs]


def cast_branches(
    branches: Sequence[Callable[..., Any]],
    operands: Sequence[Any],
    axis_name: AxisName,
) -> list[Callable[..., Any]]:
    """Returns branches of control flow whose results have equal types.

    Beside other manual axes than `axis_name`, JAX's types of the results may differ in
    the axes over which they vary.

    Args:
      branches: functions of `operands` with results of one structure.
      operands: pytrees of arrays.
      axis_name: the axes over which replicas lie.
    """
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    if manual <= set(types.as_axis_names(axis_name)) or not tracked_axes(axis_name):
        return list(branches)
    made = [jax.make_jaxpr(branch)(*operands).out_avals for branch in branches]
    axes = [
        sorted(frozenset[str]().union(*map(varying_axes_of_type, each)))
        for each in zip(*made, strict=True)
    ]

    def cast(branch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*operands: Any) -> Any:
            leaves, treedef = jax.tree.flatten(branch(*operands))
            leaves = map(cast_varying, leaves, axes)
            return jax.tree.unflatten(treedef, leaves)

        return run

    return [cast(branch) for branch in branches]


@contextlib.contextmanager
def inside_equation(eqn: Any) -> Iterator[None]:
    """While tracing: gives new equations the name scope and source line of `eqn`."""
    source = eqn.source_info
    stack = source_info_util.current_name_stack() + source.name_stack
    with (
        source_info_util.user_context(source.traceback, name_stack=stack),
        eqn.ctx.manager,
    ):
        yield


def share_scope(eqn: Any, other: Any) -> bool:
    """Returns whether `inside_equation` is the same for both, except for the line."""
    a, b = eqn.source_info.name_stack, other.source_info.name_stack
    return a == b and eqn.ctx == other.ctx


def bind_equation(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Runs one equation of a jaxpr on other operands, as `jax.core.eval_jaxpr` does."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with inside_equation(eqn):
        results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def is_differentiable(var: Any) -> bool:
    """Whether values of the type of a jaxpr's variable can have a gradient."""
    dtype = getattr(var.aval, "dtype", None)  # None: a token, or a reference.
    return dtype is not None and _is_inexact(dtype)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def is_mapped(x: Any) -> bool:
    """Whether a value differs along an axis of a `vmap` that is being run."""
    return isinstance(x, batching.BatchTracer)


def is_staged(x: Any) -> bool:
    """Whether `x` is a tracer of a jaxpr that JAX is building, as `jax.jit` does."""
    return isinstance(x, partial_eval.DynamicJaxprTracer)


def is_mutable(x: Any) -> bool:
    """Whether `x` is a mutable array, made by `jax.new_ref`."""
    return isinstance(x, core.Ref | core.Tracer) and isinstance(
        core.typeof(x), state_types.AbstractRef
    )


def has_ordered_effect(eqn: Any) -> bool:
    """Whether an equation uses a mutable array or has another ordered effect.

    Such equations run in the order of the program, whatever data they need.
    """
    return any(
        isinstance(atom.aval, state_types.AbstractRef) for atom in eqn.invars
    ) or any(effects.ordered_effects.contains(effect) for effect in eqn.effects)


def searches_for_nan() -> bool:
    """Returns whether JAX reruns compiled functions op by op to find a NaN."""
    is_on = config.debug_nans.value or config.debug_infs.value
    return bool(is_on and not config.disable_jit.value)


def is_reference(aval: Any) -> bool:
    """Returns whether a type is the type of a mutable array."""
    return isinstance(aval, state_types.AbstractRef)


def sharded_program(jaxpr: Any) -> tuple[Any, list[frozenset[str]]]:
    """Returns the body of the `shard_map` in a jaxpr, and how its inputs are split.

    Returns:
      The open jaxpr, and per input the axes over which it is split.
    """
    (eqn,) = (e for e in jaxpr.eqns if e.primitive.name == "shard_map")
    split = []
    for spec in eqn.params["in_specs"]:
        parts = [p if isinstance(p, tuple) else (p,) for p in spec]
        split.append(frozenset(n for part in parts for n in part if n is not None))
    return eqn.params["jaxpr"], split


def put_together(closed: Any, out_specs: Sequence[Any]) -> Callable[..., list[Any]]:
    """Returns a function that runs a jaxpr whose `shard_map` gets other results.

    Args:
      closed: closed jaxpr whose results are the results of its only `shard_map`, in
        their order, each of a type that varies over no axis.
      out_specs: a `PartitionSpec` for each result.
    """
    params = {"out_specs": tuple(out_specs)}

    def run(*operands: Any) -> list[Any]:
        jaxpr = closed.jaxpr
        known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        known.update(zip(jaxpr.invars, operands, strict=True))

        def read(var: Any) -> Any:
            return var.val if isinstance(var, core.Literal) else known[var]

        results: list[Any] = []
        for eqn in jaxpr.eqns:
            is_mapped = eqn.primitive.name == "shard_map"
            changed = eqn.replace(params=eqn.params | params) if is_mapped else eqn
            results = bind_equation(changed, [read(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return run


def touches_reference(eqn: Any) -> bool:
    """Returns whether an equation reads or writes a mutable array."""
    return any(isinstance(effect, state_types.RefEffect) for effect in eqn.effects)


def jit_inlined(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `jax.jit(fn)` that is inlined into the caller's jaxpr."""
    kinds = getattr(api, "Inline", None)  # JAX 0.12, where True means "when lowering".
    return jax.jit(fn, inline=True if kinds is None else kinds.JAX_EARLY)


def side_effects(jaxpr: Any) -> list[str]:
    """Returns the names of a jaxpr's effects on the outside, such as printing."""
    inner = (core.NamedAxisEffect, core.InternalMutableArrayEffect)
    return sorted(str(e) for e in jaxpr.effects if not isinstance(e, inner))


def axis_effects(jaxprs: Iterable[Any]) -> frozenset[Any]:
    """Returns the effects of jaxprs that name a mesh axis, such as `lax.axis_index`."""
    found = (e for jaxpr in jaxprs for e in jaxpr.effects)
    return frozenset(e for e in found if isinstance(e, core.NamedAxisEffect))


def scan_operands(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the numbers of constants and of carries of a `scan` equation."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()  # JAX 0.12
    return len(consts), len(carries)


def backend_is_initialized() -> bool:
    """Returns whether JAX has already chosen its devices."""
    return xla_bridge.backends_are_initialized()


def distributed_client() -> Any | None:
    """Returns the client of `jax.distributed`, or None if it was not started."""
    return distributed.global_state.client


def offer_gloo_address(host: str) -> None:
    """Makes XLA's gloo, on CPUs, offer its peers the numeric address `host`.

    By default it offers the address to which the host resolves its own name. On Debian
    and Ubuntu that is 127.0.1.1, which no other host can reach. Call this before JAX
    chooses its devices. MPI in place of gloo does not need it.
    """

    def make_client(collectives: Any = None) -> Any:
        client = distributed.global_state.client
        kind = config.cpu_collectives_implementation.value
        if collectives is None and client is not None and kind == "gloo":
            collectives = _jax.make_gloo_tcp_collectives(
                distributed_client=client, hostname=host
            )
        return xla_bridge.make_cpu_client(collectives)

    xla_bridge.register_backend_factory(
        "cpu", make_client, priority=0, fail_quietly=False
    )


def detect_cluster(
    *, timeout_s: float
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Asks JAX's cluster environments (Slurm, Open MPI, Kubernetes, TPU).

    Returns:
      Coordinator address, number of processes, process id and local device ids, each
      None if no environment was found.
    """
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, int(timeout_s)
    )


def current_trace() -> Any:
    """Returns an object that identifies the function body that is being traced."""
    return core.trace_ctx.trace


def is_staging() -> bool:
    """Whether a jaxpr is being traced, also inside of `vmap` or `grad`."""
    trace, staging = current_trace(), partial_eval_internal.DynamicJaxprTrace
    while trace is not None and not isinstance(trace, staging):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def bound_axis_names() -> tuple[str, ...]:
    """Returns the names of the axes that are bound here, while tracing."""
    return tuple(str(name) for name in core.get_axis_env().axis_names())


def axis_size(axis_name: AxisName) -> int:
    """Returns the number of replicas on an axis, or on several, while tracing.

    Raises:
      ValueError: `axis_name` is not a name, or is not bound.
    """
    names = types.as_axis_names(axis_name)
    try:
        return lax.axis_size(names)
    except NameError:
        raise ValueError(
            f"`axis_name={axis_name!r}` is not bound here; bound axes: "
            f"{bound_axis_names() or 'none'}. Call this inside a step that "
            "`jdp.data_parallel` wraps, or under `shard_map`, `pmap(axis_name=)` or "
            "`vmap(axis_name=)` with that name."
        ) from None


def axis_index(axis_name: Any) -> jax.Array:
    """Returns the number of this replica, int32 (), for a computation of jdp's own.

    A step with `num_shards` refuses `lax.axis_index` in the user's code.
    """
    with jax.named_scope(_OWN_INDEX):
        return lax.axis_index(axis_name)


def is_own_index(eqn: Any) -> bool:
    """Whether an equation is an `axis_index`."""
    return _OWN_INDEX in str(eqn.source_info.name_stack)


_OWN_INDEX = "jdp_axis_index"


def is_bound(axis_name: AxisName) -> bool:
    """Returns whether all given axes are bound where this is traced."""
    return set(types.as_axis_names(axis_name)) <= set(bound_axis_names())


def tracked_axes(axis_name: AxisName) -> frozenset[str]:
    """Returns the axes along which JAX tracks varying values by type here."""
    # Per axis: for several at once, `lax.axis_index` takes 20 times as long.
    ranks = map(axis_index, types.as_axis_names(axis_name))
    return frozenset[str]().union(*map(varying_axes, ranks))


def is_alone(axis_name: AxisName) -> bool:
    """Whether there is one replica, and no type to be satisfied by a collective."""
    return axis_size(axis_name) == 1 and not tracked_axes(axis_name)


def cast_tree_varying(tree: Any, axis_name: AxisName) -> Any:
    """Casts leaves to what may differ between the replicas; no data moves."""
    tracked = tracked_axes(axis_name)
    if not tracked:
        return tree
    names = tuple(n for n in types.as_axis_names(axis_name) if n in tracked)
    return jax.tree.map(lambda x: cast_varying(x, names), tree)
