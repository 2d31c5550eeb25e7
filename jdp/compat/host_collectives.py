"""Host collectives: operations of a program that a function on the host carries out.

A callback of JAX has neither derivatives nor a rule for `vmap`, and its results have no
types for `shard_map`. A host collective has all three: it is the same function as a
program of XLA's collectives, its substitute, of which derivatives and batches are made.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from jdp.compat import host_functions
from jdp.compat.host_functions import HostFunction


class HostCollective(NamedTuple):
    """A collective on the host, and the same function for XLA."""

    run: Callable[[Sequence[Any], Sequence[Any]], None]  # fills (results, operands).
    substitute: Callable[..., list[jax.Array]]  # operands -> results
    num_in_place: int = 0  # first operands whose memory the first results take.


def run_on_host(
    collective: HostCollective,
    token: jax.Array,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    varying: Sequence[str],
) -> tuple[jax.Array, list[jax.Array]]:
    """Runs a collective where the program reaches this point, after `token` is there.

    Args:
      collective: the functions.
      token: uint32 (1,); XLA may run independent operations in another order on each
        process, and tokens make the order the same.
      operands: arrays of this replica.
      results: shapes and dtypes of the results.
      varying: mesh axes over which the results may differ, where JAX tracks them.

    Returns:
      The next token, and the results.
    """
    token, *filled = _host_collective_p.bind(
        token,
        *operands,
        collective=collective,
        results=tuple((x.shape, jnp.dtype(x.dtype)) for x in results),
        varying=frozenset(varying),
    )
    return token, filled


def is_on_host(eqn: Any) -> bool:
    """Whether an equation of a jaxpr is a host collective."""
    return eqn.primitive is _host_collective_p


def run_equation(
    eqn: Any, operands: Sequence[jax.Array], earlier: Sequence[jax.Array]
) -> list[jax.Array]:
    """Runs the host collective of an equation after the arrays `earlier` are there.

    Args:
      eqn: an equation that `is_on_host`.
      operands: its operands, the token first.
      earlier: arrays, of which it gets one element each.

    Returns:
      Its results, the next token first.
    """
    parts = [_first_element(x) for x in earlier if _can_select(x)]
    if not parts:
        return _host_collective_p.bind(*operands, **eqn.params)
    collective, count = eqn.params["collective"], len(operands) - 1

    def run(results: Sequence[Any], operands: Sequence[Any]) -> None:
        collective.run(results, operands[:count])

    params = eqn.params | {"collective": collective._replace(run=run)}
    return _host_collective_p.bind(*operands, lax.concatenate(parts, 0), **params)


def wait_for(token: jax.Array, arrays: Sequence[Any]) -> list[Any]:
    """Returns arrays, bit for bit, that are not there before `token` is.

    XLA on CPU drops `lax.optimization_barrier` before it orders a program. It does not
    know that tokens are zero.
    """
    found = list(arrays)
    waiting = [i for i, x in enumerate(arrays) if _can_select(x)]
    selected = _wait_p.bind(token, *(arrays[i] for i in waiting))
    for i, x in zip(waiting, selected, strict=True):
        found[i] = x
    return found


def join(arrays: Sequence[Any]) -> jax.Array:
    """Returns a bool () that is not there before one element of each array is."""
    parts = [_first_element(x) for x in arrays if _can_select(x)]
    return lax.concatenate(parts, 0).any() if parts else jnp.zeros((), bool)


def _can_select(x: Any) -> bool:
    aval = jax.typeof(x)
    if type(aval) is not ShapedArray or not aval.size:  # a reference; nothing.
        return False
    is_extended = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return not is_extended and aval.dtype != jax.dtypes.float0


def _first_element(x: Any) -> jax.Array:
    """Returns whether the first element is not zero, bool (1,)."""
    x = jnp.asarray(x)
    return lax.slice(lax.reshape(x, (x.size,)), (0,), (1,)) != 0


def _wait(token: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    is_there = token[0] == 0
    return [
        lax.select(lax.broadcast(is_there, x.shape), x, lax.full_like(x, 0))
        for x in arrays
    ]


def _type(
    token: Any, *operands: Any, collective: Any, results: Any, varying: frozenset[str]
) -> list[Any]:
    if not varying:
        return [token, *[ShapedArray(shape, dtype) for shape, dtype in results]]
    like = operands[0]  # for its mesh, none of whose axes splits an array here.
    typed = [
        like.update(
            shape=shape,
            dtype=dtype,
            weak_type=False,
            sharding=like.sharding.update(spec=PartitionSpec(*[None] * len(shape))),
            manual_axis_type=like.mat.update(varying=varying),
        )
        for shape, dtype in results
    ]
    return [token, *typed]


def _lower(
    ctx: Any,
    *operands: Any,
    collective: HostCollective,
    results: Sequence[tuple[tuple[int, ...], Any]],
    varying: frozenset[str],
) -> Any:
    del varying
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ctx.avals_in]
    filled = [jax.ShapeDtypeStruct((1,), jnp.uint32)]
    filled += [jax.ShapeDtypeStruct(*x) for x in results]

    run_collective = collective.run

    def run(results: Sequence[Any], operands: Sequence[Any]) -> None:
        run_collective(results[1:], operands[1:])

    return host_functions.lower(
        ctx,
        operands,
        HostFunction(run, filled, given),
        aliases={i: i for i in range(collective.num_in_place + 1)},
    )


def _differentiate(
    primals: Sequence[Any], tangents: Sequence[Any], *, collective: Any, **params: Any
) -> tuple[list[Any], list[Any]]:
    token, *operands = primals
    is_moving = [type(t) is not ad.Zero for t in tangents[1:]]
    moving = [x for x, moves in zip(operands, is_moving, strict=True) if moves]
    speeds = [t for t in tangents[1:] if type(t) is not ad.Zero]

    def substitute(*moving: Any) -> list[jax.Array]:
        left = iter(moving)
        pairs = zip(operands, is_moving, strict=True)
        return collective.substitute(
            *[next(left) if moves else x for x, moves in pairs]
        )

    results, slopes = jax.jvp(substitute, moving, speeds)
    at_rest = ad.Zero(jax.typeof(token).to_tangent_aval())
    return [token, *results], [at_rest, *slopes]


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, collective: Any, **params: Any
) -> tuple[list[Any], list[Any]]:
    token, *operands = operands
    batched = jax.vmap(collective.substitute, in_axes=tuple(dims[1:]))(*operands)
    return [token, *batched], [dims[0], *[0] * len(batched)]


def _transpose(
    cotangents: Sequence[Any], *operands: Any, collective: Any, **params: Any
) -> list[Any]:
    """Transposes the substitute, for `jax.linear_transpose` of a reduction."""
    is_linear = [ad.is_undefined_primal(x) for x in operands[1:]]
    linear = [x.aval for x in operands[1:] if ad.is_undefined_primal(x)]

    def substitute(*linear: Any) -> list[jax.Array]:
        left = iter(linear)
        pairs = zip(operands[1:], is_linear, strict=True)
        return collective.substitute(
            *[next(left) if is_in else x for x, is_in in pairs]
        )

    given = [ad.instantiate_zeros(x) for x in cotangents[1:]]
    found = iter(jax.linear_transpose(substitute, *linear)(given))
    return [None, *[next(found) if is_in else None for is_in in is_linear]]


_host_collective_p = Primitive("jdp_host_collective")
_host_collective_p.multiple_results = True
_host_collective_p.def_impl(
    lambda *xs, **params: jax.jit(lambda *xs: _host_collective_p.bind(*xs, **params))(
        *xs
    )
)
_host_collective_p.def_abstract_eval(_type)
mlir.register_lowering(_host_collective_p, _lower)
ad.primitive_jvps[_host_collective_p] = _differentiate
ad.primitive_transposes[_host_collective_p] = _transpose
batching.primitive_batchers[_host_collective_p] = _batch

_wait_p = Primitive("jdp_wait")
_wait_p.multiple_results = True
_wait_p.def_abstract_eval(lambda token, *arrays: list(arrays))
mlir.register_lowering(_wait_p, mlir.lower_fun(_wait, multiple_results=True))
