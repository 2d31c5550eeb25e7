"""Sample draws: which random numbers of a step belong to the samples of a replica?

A key that is the same on all replicas draws the same numbers on each of them: the same
dropout mask for other samples. One device with the samples of all replicas draws other
numbers for each sample. Here each replica gets its part of that draw.

Which dimension of a draw counts samples cannot be read from one program: 64 may be the
samples of a replica or the features of a layer. So the step is traced a second time, as
if each replica had the samples of all, and the draws of both programs are compared. A
draw that grows by the number of replicas along one dimension has the samples there.
Draws that do not grow, such as noise on parameters, stay the same on all replicas.
Draws from a key that differs between replicas are left alone.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params
from jax.sharding import PartitionSpec

from jdp import compat
from jdp.backward import exchange, flow
from jdp.collectives import auto
from jdp.compat import draws, primitives
from jdp.compat.draws import Part
from jdp.replicas.mesh import World
from jdp.step import call_arguments, draw_search, draw_uses

T = TypeVar("T")


def take_parts(
    traced: Any,
    world: World,
    batches: tuple[Any, ...],
    trace_wide: Callable[[], Any],
) -> Any:
    """Returns a step's program in which each replica draws for its own samples.

    Args:
      traced: closed jaxpr with the `shard_map` of the step.
      world: the replicas.
      batches: the arguments of the step after the state.
      trace_wide: traces the step as `trace_wide` does.

    Returns:
      `traced` itself if it has no draws from keys that are the same on all replicas.

    Raises:
      ValueError: it is unclear which part of a draw belongs to a replica.
    """
    if not draw_search.DrawFinder().has_any(traced):
        return traced
    single = draw_search.Copies().of_value(traced)
    differ = draw_search.find_operands_that_differ(single, world)
    own = frozenset(i for i, operands in differ.items() if operands[0])
    found = draw_search.DrawFinder(own).find(single)
    found = list(filter(draw_search.may_grow, found))
    if not found:
        return traced
    try:
        wide = trace_wide()
    except Exception as error:
        leaves = call_arguments.split_leaves(batches)
        lengths = {x.shape[0] // world.num_replicas for x in leaves}
        first = next((x for x in found if draw_search.fits_samples(x, lengths)), None)
        if first is None:
            return traced
        raise _refusal(
            first.eqn,
            world,
            "must be compared with the draw for the samples of all replicas, and the "
            f"step fails with so many ({type(error).__name__}: {error})",
        ) from error
    uses = draw_uses.find_uses(single, wide, world)
    _warn_of_first_keys(single, world, differ, uses)
    finder = draw_search.DrawFinder(own | uses.complete)
    if not finder.has_any(single):
        return traced
    return _Parts(world, differ, finder, uses.loops).of_program(single, wide)


def trace_wide(
    world: World,
    batches: tuple[Any, ...],
    trace: Callable[[tuple[Any, ...]], T],
) -> T:
    """Returns the trace in which each replica has the samples of all replicas.

    Arrays with one row per replica, beside longer ones, may be samples or weights of
    replicas. If the step fails where they are samples, they are weights: arrays of one
    dimension, or else all.
    """
    n = world.num_replicas
    leaves = call_arguments.split_leaves(batches)
    has_longer = any(x.shape[0] > n for x in leaves)
    ranks = {x.ndim for x in leaves if has_longer and x.shape[0] == n}
    # Up to which number of dimensions such arrays are weights.
    first, *others = [0, *sorted({1, max(ranks)} if ranks else ())]
    with warnings.catch_warnings(), auto.without_measuring():
        warnings.simplefilter("ignore")
        try:
            return trace(_widen(world, batches, first))
        except Exception:
            for rank in others:
                with contextlib.suppress(Exception):
                    return trace(_widen(world, batches, rank))
            raise


def _widen(world: World, batches: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """Returns batches in which each replica has the samples of all replicas.

    Arrays with one row per replica and at most `rank` dimensions stay as they are.
    """
    n = world.num_replicas

    def widen(x: Any) -> jax.ShapeDtypeStruct:
        factor = 1 if x.shape[0] == n and x.ndim <= rank else n
        shape = (x.shape[0] * factor, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=world.split)

    return call_arguments.map_batches(widen, batches)


def _warn_of_first_keys(
    single: Any, world: World, differ: dict[int, list[bool]], uses: draw_uses.Uses
) -> None:
    """Warns of draws from a key per sample that use the first key for all samples."""
    first = [
        found.eqn
        for found in draw_search.DrawFinder(uses.complete).find(single)
        if draws.uses_first_key(found.eqn) and uses.pair.is_larger(found.eqn.invars[0])
    ]
    if not first:
        return
    by_data = draw_search.find_operands_that_differ(single, world, with_index=False)
    for eqn in first:
        if differ[id(eqn)][0] and not by_data[id(eqn)][0]:
            continue  # From a key of each replica's own.
        warnings.warn(
            f"A step draws from a key per sample{exchange.line_of(eqn)}, and the keys "
            f"are of the implementation {draws.implementation(eqn)!r}: "
            "under `jax.vmap`, JAX draws for all of them from the first key. So the "
            "replicas draw other numbers than one device with all samples. Draw for "
            "all samples from one key, or use keys of JAX's default, threefry.",
            stacklevel=2,
        )
        return


class _Parts:
    """Replaces draws by the part that belongs to a replica."""

    def __init__(
        self,
        world: World,
        differ: dict[int, list[bool]],
        finder: draw_search.DrawFinder,
        loops: frozenset[int],
    ):
        """Takes the parts of some draws.

        Args:
          world: the replicas.
          differ: by the id of a draw: whether each operand differs between replicas.
          finder: finds these draws.
          loops: the ids of `while` loops with more iterations for more samples.
        """
        self._world = world
        self._differ = differ
        self._finder = finder
        self._loops = loops
        self._any_finder = draw_search.DrawFinder()
        self._in_sample_loops: list[Any] = []
        self._functions: dict[Any, Callable[..., Any]] = {}

    def of_program(self, traced: Any, wide: Any) -> Any:
        """Returns a closed jaxpr with the parts of its draws.

        Args:
          traced: the program of the step.
          wide: the same with the samples of all replicas on each.
        """
        made = self._of_value(traced, wide, False)
        if self._in_sample_loops:
            differ = draw_search.find_operands_that_differ(made, self._world)
            for eqn in self._in_sample_loops:
                if not differ.get(id(eqn), [False])[0]:
                    raise _refusal(
                        eqn,
                        self._world,
                        "is in a loop that has more iterations for more samples",
                        "Make a key for each sample before the loop, with "
                        "`jax.random.split(key, x.shape[0])`",
                    )
        return made

    def _of_value(self, value: Any, wide: Any, in_loop: bool) -> Any:
        """Returns a parameter of an equation, with its jaxprs replaced."""
        if isinstance(value, tuple | list) and isinstance(wide, tuple | list):
            if len(value) != len(wide):
                return value
            pairs = zip(value, wide, strict=True)
            return draw_search.like(
                value, [self._of_value(x, w, in_loop) for x, w in pairs]
            )
        if not isinstance(value, ClosedJaxpr | Jaxpr) or not self._finder.has_any(
            value
        ):
            return value
        body, wide_body = (flow.open_jaxpr(x)[0] for x in (value, wide))
        if body is value:  # Open, or either in JAX 0.12.
            return self._of_jaxpr(value, wide_body, in_loop)
        return value.replace(jaxpr=self._of_value(body, wide_body, in_loop))

    def _of_jaxpr(self, jaxpr: Any, wide: Any, in_loop: bool) -> Any:
        concerned = [
            list(filter(self._any_finder.concerns, x.eqns)) for x in (jaxpr, wide)
        ]
        names = [[eqn.primitive.name for eqn in eqns] for eqns in concerned]
        if names[0] != names[1]:
            raise _refusal(
                next(self._finder.find(jaxpr)).eqn,
                self._world,
                "is one of other draws for the samples of a replica than for the "
                "samples of all replicas",
            )
        partners = dict(zip(map(id, concerned[0]), concerned[1], strict=True))
        eqns: list[Any] = []
        for eqn in jaxpr.eqns:
            if not self._finder.concerns(eqn):
                eqns.append(eqn)
            elif eqn.primitive.name in primitives.DRAWS:
                eqns.append(self._of_draw(eqn, partners[id(eqn)], in_loop))
            else:
                eqns.append(self._of_call(eqn, partners[id(eqn)], in_loop))
        effects = jaxpr.effects.union(*(eqn.effects for eqn in eqns))
        return jaxpr.replace(eqns=eqns, effects=effects)

    def _of_call(self, eqn: Any, wide: Any, in_loop: bool) -> Any:
        """Returns an equation with the jaxprs in its parameters replaced."""
        if eqn.primitive.name == "scan":
            in_loop |= eqn.params["length"] != wide.params["length"]
        in_loop |= id(eqn) in self._loops
        params = {
            k: self._of_value(v, wide.params.get(k), in_loop)
            for k, v in eqn.params.items()
        }
        axes = compat.axis_effects(jaxprs_in_params(params))
        if eqn.primitive.name == "shard_map":  # It binds the axes.
            axes = frozenset()
        return eqn.replace(params=params, effects=eqn.effects | axes)

    def _of_draw(self, eqn: Any, wide: Any, in_loop: bool) -> Any:
        """Returns the equation that draws a replica's part."""
        place = draw_search.Place.find(eqn, wide)
        shape, wide_shape, grown, keys_grow = place
        if not grown:
            if in_loop and not keys_grow:
                self._in_sample_loops.append(eqn)
            return eqn
        if eqn.primitive.name == "random_fold_in":
            if keys_grow or self._differ.get(id(eqn), [False, False])[1]:
                return eqn
            raise _refusal(
                eqn,
                self._world,
                "folds positions of samples, as every replica counts them, into a key",
                "Use `jax.random.split(key, x.shape[0])` for a key per sample",
            )
        n = self._world.num_replicas
        if eqn.primitive.name == "random_split" and _has_other_keys(place, n):
            raise _refusal(
                eqn,
                self._world,
                "makes keys of samples and keys that belong to no sample at once",
                "Split off the others first: `key, sub = jax.random.split(key)`, then "
                "`jax.random.split(sub, x.shape[0])` for a key per sample",
            )
        sizes = [(shape[i], wide_shape[i]) for i in grown]
        if keys_grow or [b for _, b in sizes] != [n * a for a, _ in sizes[:1]]:
            raise _refusal(
                eqn,
                self._world,
                f"has shape {list(shape)} for the samples of a replica and "
                f"{list(wide_shape)} for the samples of all {n} replicas",
            )
        return self._trace_part(eqn, Part(shape, grown[0], n))

    def _function_of(self, eqn: Any, part: Part) -> Callable[..., Any]:
        """Returns the function of a part, the same for equal draws: traced once."""
        names, kind = self._world.axis_names, eqn.primitive.name
        key = kind, part, tuple(sorted(eqn.params.items()))
        if key in self._functions:
            return self._functions[key]

        def draw(*operands: jax.Array) -> jax.Array:
            return draws.TAKE_PART[kind](
                *operands, part, compat.axis_index(names), **eqn.params
            )

        draw.__name__ = f"{kind}_of_replica"
        whole = PartitionSpec()
        self._functions[key] = jax.shard_map(
            jax.jit(draw),
            mesh=self._world.mesh,
            in_specs=whole,
            out_specs=whole,
            axis_names=self._world.program_axes,
            check_vma=False,
        )
        return self._functions[key]

    def _trace_part(self, eqn: Any, part: Part) -> Any:
        """Returns the equation of a part, between the variables of `eqn`."""
        mapped = self._function_of(eqn, part)
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        traced = jax.make_jaxpr(mapped)(*avals)
        body, _ = compat.sharded_program(flow.open_jaxpr(traced)[0])
        known = dict(zip(body.invars, eqn.invars, strict=True))
        known |= zip(body.outvars, eqn.outvars, strict=True)

        def rename(variables: Any) -> list[Any]:
            return [v if isinstance(v, Literal) else known.get(v, v) for v in variables]

        (made,) = body.eqns  # One `jit`, so that draws share no variables inside.
        return made.replace(
            invars=rename(made.invars),
            outvars=rename(made.outvars),
            source_info=eqn.source_info,
        )


def _has_other_keys(place: draw_search.Place, n: int) -> bool:
    """Whether some of the keys of a split do not belong to samples.

    Args:
      place: the shapes of the split.
      n: the number of replicas.
    """
    if len(place.grown) != 1 or place.keys_grow:
        return False
    size, wide = (x[place.grown[0]] for x in (place.shape, place.wide_shape))
    others, rest = divmod(n * size - wide, n - 1)
    return not rest and 0 < others < size


def _refusal(eqn: Any, world: World, reason: str, remedy: str = "") -> ValueError:
    """Returns the error for a draw whose part of a replica is unknown."""
    own = f"`key = jax.random.fold_in(key, jax.lax.axis_index({world.axis_name!r}))`"
    give = f"{remedy}, or give" if remedy else "Give"
    return ValueError(
        "A draw of random numbers, from a key that is the same on all replicas"
        f"{exchange.line_of(eqn)}, {reason}. So jdp cannot tell which numbers belong "
        f"to the samples of a replica. {give} each replica a key of its own in the "
        f"step: {own}."
    )
