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

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params
from jax.sharding import PartitionSpec

from jdp import compat
from jdp.backward import exchange, flow
from jdp.collectives import auto
from jdp.compat import draws, origins, primitives
from jdp.compat.draws import Part
from jdp.replicas.mesh import World
from jdp.step import call_arguments
from jdp.step.sameness import SamenessAnalysis


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
      trace_wide: traces the step with the batches of `widen`.

    Returns:
      `traced` itself if it has no draws from keys that are the same on all replicas.

    Raises:
      ValueError: it is unclear which part of a draw belongs to a replica.
    """
    if not _DrawFinder().has_any(traced):
        return traced
    single = _Copies().of_value(traced)
    parts = _Parts(world, _find_operands_that_differ(single, world))
    found = list(filter(_may_grow, parts.finder.find(single)))
    if not found:
        return traced
    try:
        with warnings.catch_warnings(), auto.without_measuring():
            warnings.simplefilter("ignore")
            wide = trace_wide()
    except Exception as error:
        leaves = call_arguments.split_leaves(batches)
        lengths = {x.shape[0] // world.num_replicas for x in leaves}
        first = next((x for x in found if _fits_samples(x, lengths)), None)
        if first is None:
            return traced
        raise _refusal(
            first.eqn,
            world,
            "must be compared with the draw for the samples of all replicas, and the "
            f"step fails with so many ({type(error).__name__}: {error})",
        ) from error
    return parts.of_program(single, wide)


def widen(world: World, batches: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns batches in which each replica has the samples of all replicas.

    Arrays with one row per replica, beside longer ones, stay as they are.
    """
    n = world.num_replicas
    has_longer = any(x.shape[0] > n for x in call_arguments.split_leaves(batches))

    def widened(x: Any) -> jax.ShapeDtypeStruct:
        factor = 1 if has_longer and x.shape[0] == n else n
        shape = (x.shape[0] * factor, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=world.split)

    return call_arguments.map_batches(widened, batches)


def _find_operands_that_differ(traced: Any, world: World) -> dict[int, list[bool]]:
    """Returns per operand of a draw, by its id, whether it differs in all calls."""
    body, inputs = compat.sharded_program(flow.open_jaxpr(traced)[0])
    analysis = SamenessAnalysis(
        world.axis_names, refuse_divided=False, observed=primitives.DRAWS
    )
    analysis.follow(body, tuple(map(analysis.mask, inputs)))
    return analysis.observed


class _DrawFinder:
    """Finds draws in jaxprs, at any depth, once per jaxpr."""

    def __init__(self, left_out: frozenset[int] = frozenset()):
        """Leaves out equations with some ids."""
        self._left_out = left_out
        self._known: dict[int, tuple[Any, bool]] = {}  # by id; holds the jaxpr.

    def has_any(self, jaxpr: Any) -> bool:
        """Returns whether there is a draw in a jaxpr, open or closed."""
        if id(jaxpr) not in self._known:
            found = any(map(self.concerns, flow.open_jaxpr(jaxpr)[0].eqns))
            self._known[id(jaxpr)] = jaxpr, found
        return self._known[id(jaxpr)][1]

    def concerns(self, eqn: Any) -> bool:
        """Returns whether an equation is a draw, or has draws inside."""
        if eqn.primitive.name in primitives.DRAWS:
            is_any = id(eqn) not in self._left_out
        elif eqn.primitive.name in primitives.KERNELS:
            return False
        else:
            is_any = any(map(self.has_any, jaxprs_in_params(eqn.params)))
        return is_any and not origins.is_bound_by(eqn, origins.OWN_DRAWS)

    def find(self, jaxpr: Any, *, in_loop: bool = False) -> Iterator["_Found"]:
        """Yields the draws in a jaxpr, in order."""
        for eqn in filter(self.concerns, flow.open_jaxpr(jaxpr)[0].eqns):
            if eqn.primitive.name in primitives.DRAWS:
                yield _Found(eqn, in_loop)
            is_loop = in_loop or eqn.primitive.name == "scan"
            for inner in filter(self.has_any, jaxprs_in_params(eqn.params)):
                yield from self.find(inner, in_loop=is_loop)


class _Found(NamedTuple):
    """A draw in a jaxpr, or in a jaxpr inside it."""

    eqn: Any
    in_loop: bool


def _may_grow(found: _Found) -> bool:
    """Returns whether a draw may be larger for more samples, or be made more often."""
    shape = _Place.find(found.eqn, found.eqn).shape
    return bool(shape) or found.in_loop


def _fits_samples(found: _Found, lengths: set[int]) -> bool:
    """Returns whether a draw may be for samples, by its shape.

    Args:
      found: the draw.
      lengths: the lengths of a replica's batches.
    """
    shape = _Place.find(found.eqn, found.eqn).shape
    return any(size % length == 0 for size in shape for length in lengths)


class _Copies:
    """Copies jaxprs with draws, so that no two equations share one.

    The same jaxpr, such as the `jit` in `jax.random.normal`, may be called with keys
    that differ between replicas and with keys that do not.
    """

    def __init__(self) -> None:
        self._finder = _DrawFinder()

    def of_value(self, value: Any) -> Any:
        """Returns a parameter of an equation, with its jaxprs copied."""
        if isinstance(value, tuple | list):
            return _like(value, [self.of_value(x) for x in value])
        is_jaxpr = isinstance(value, ClosedJaxpr | Jaxpr)
        if not is_jaxpr or not self._finder.has_any(value):
            return value
        body, _ = flow.open_jaxpr(value)
        if body is not value:
            return value.replace(jaxpr=self.of_value(body))
        assert isinstance(value, Jaxpr)
        return value.replace(eqns=list(map(self._of_equation, value.eqns)))

    def _of_equation(self, eqn: Any) -> Any:
        if not self._finder.concerns(eqn):
            return eqn
        params = {k: self.of_value(v) for k, v in eqn.params.items()}
        return eqn.replace(params=params)


def _like(values: Any, parts: list[Any]) -> Any:
    """Returns a tuple or a list with other values."""
    is_named = hasattr(values, "_fields")  # As in `custom_linear_solve`.
    return type(values)(*parts) if is_named else type(values)(parts)


class _Parts:
    """Replaces draws by the part that belongs to a replica."""

    def __init__(self, world: World, differ: dict[int, list[bool]]):
        """Takes the parts of all draws but those whose key differs.

        Args:
          world: the replicas.
          differ: by the id of a draw: whether each operand differs between replicas.
        """
        self._world = world
        self._differ = differ
        own = frozenset(i for i, operands in differ.items() if operands[0])
        self.finder = _DrawFinder(own)
        self._any_finder = _DrawFinder()
        self._in_sample_loops: list[Any] = []

    def of_program(self, traced: Any, wide: Any) -> Any:
        """Returns a closed jaxpr with the parts of its draws.

        Args:
          traced: the program of the step.
          wide: the same with the samples of all replicas on each.
        """
        made = self._of_value(traced, wide, False)
        if self._in_sample_loops:
            differ = _find_operands_that_differ(made, self._world)
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
            return _like(value, [self._of_value(x, w, in_loop) for x, w in pairs])
        if not isinstance(value, ClosedJaxpr | Jaxpr) or not self.finder.has_any(value):
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
                next(self.finder.find(jaxpr)).eqn,
                self._world,
                "is one of other draws for the samples of a replica than for the "
                "samples of all replicas",
            )
        partners = dict(zip(map(id, concerned[0]), concerned[1], strict=True))
        eqns: list[Any] = []
        for eqn in jaxpr.eqns:
            if not self.finder.concerns(eqn):
                eqns.append(eqn)
            elif eqn.primitive.name in primitives.DRAWS:
                eqns += self._of_draw(eqn, partners[id(eqn)], in_loop)
            else:
                eqns.append(self._of_call(eqn, partners[id(eqn)], in_loop))
        effects = jaxpr.effects.union(*(eqn.effects for eqn in eqns))
        return jaxpr.replace(eqns=eqns, effects=effects)

    def _of_call(self, eqn: Any, wide: Any, in_loop: bool) -> Any:
        """Returns an equation with the jaxprs in its parameters replaced."""
        if eqn.primitive.name == "scan":
            in_loop |= eqn.params["length"] != wide.params["length"]
        params = {
            k: self._of_value(v, wide.params.get(k), in_loop)
            for k, v in eqn.params.items()
        }
        axes = compat.axis_effects(jaxprs_in_params(params))
        if eqn.primitive.name == "shard_map":  # It binds the axes.
            axes = frozenset()
        return eqn.replace(params=params, effects=eqn.effects | axes)

    def _of_draw(self, eqn: Any, wide: Any, in_loop: bool) -> list[Any]:
        """Returns the equations that draw a replica's part."""
        place = _Place.find(eqn, wide)
        shape, wide_shape, grown, keys_grow = place
        if not grown:
            if in_loop and not keys_grow:
                self._in_sample_loops.append(eqn)
            return [eqn]
        if eqn.primitive.name == "random_fold_in":
            if keys_grow or self._differ.get(id(eqn), [False, False])[1]:
                return [eqn]
            raise _refusal(
                eqn,
                self._world,
                "folds positions of samples, as every replica counts them, into a key",
                "Use `jax.random.split(key, x.shape[0])` for a key per sample",
            )
        n = self._world.num_replicas
        sizes = [(shape[i], wide_shape[i]) for i in grown]
        if keys_grow or [b for _, b in sizes] != [n * a for a, _ in sizes[:1]]:
            raise _refusal(
                eqn,
                self._world,
                f"has shape {list(shape)} for the samples of a replica and "
                f"{list(wide_shape)} for the samples of all {n} replicas",
            )
        return self._trace_part(eqn, Part(shape, grown[0], n))

    def _trace_part(self, eqn: Any, part: Part) -> list[Any]:
        """Returns the equations of a part, between the variables of `eqn`."""
        names, kind = self._world.axis_names, eqn.primitive.name

        def draw(*operands: jax.Array) -> jax.Array:
            return draws.TAKE_PART[kind](
                *operands, part, lax.axis_index(names), **eqn.params
            )

        draw.__name__ = f"{kind}_of_replica"
        whole = PartitionSpec()
        mapped = jax.shard_map(
            jax.jit(draw),
            mesh=self._world.mesh,
            in_specs=whole,
            out_specs=whole,
            axis_names=self._world.program_axes,
            check_vma=False,
        )
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        traced = jax.make_jaxpr(mapped)(*avals)
        body, _ = compat.sharded_program(flow.open_jaxpr(traced)[0])
        known = dict(zip(body.invars, eqn.invars, strict=True))
        known |= zip(body.outvars, eqn.outvars, strict=True)

        def rename(variables: Any) -> list[Any]:
            return [v if isinstance(v, Literal) else known.get(v, v) for v in variables]

        return [
            made.replace(
                invars=rename(made.invars),
                outvars=rename(made.outvars),
                source_info=eqn.source_info,
            )
            for made in body.eqns
        ]


class _Place(NamedTuple):
    """Shapes of one draw: for the samples of a replica, and for the samples of all."""

    shape: tuple[int, ...]  # per key.
    wide_shape: tuple[int, ...]
    grown: tuple[int, ...]  # the dimensions in which these differ.
    keys_grow: bool  # whether there are more keys.

    @classmethod
    def find(cls, eqn: Any, wide: Any) -> "_Place":
        """Compares two equations of one primitive of `primitives.DRAWS`."""
        keys, wide_keys = (e.invars[0].aval.shape for e in (eqn, wide))
        if "shape" in eqn.params:
            shape, wide_shape = eqn.params["shape"], wide.params["shape"]
        else:
            shape, wide_shape = (e.invars[1].aval.shape for e in (eqn, wide))
            if eqn.primitive.name == "random_gamma":
                shape, wide_shape = shape[len(keys) :], wide_shape[len(wide_keys) :]
        if len(shape) == len(wide_shape):
            pairs = zip(shape, wide_shape, strict=True)
            grown = tuple(i for i, (a, b) in enumerate(pairs) if a != b)
        else:
            grown = tuple(range(min(len(shape), len(wide_shape)) + 1))
        return cls(tuple(shape), tuple(wide_shape), grown, keys != wide_keys)


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
