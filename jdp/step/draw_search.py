"""Draw search: which draws of random numbers does a program have?"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params

from jdp import compat
from jdp.backward import flow
from jdp.compat import origins, primitives
from jdp.replicas.mesh import World
from jdp.step.sameness import SamenessAnalysis


def find_operands_that_differ(
    traced: Any, world: World, *, with_index: bool = True
) -> dict[int, list[bool]]:
    """Returns per operand of a draw, by its id, whether it differs in all calls.

    Args:
      traced: closed jaxpr of the step.
      world: the replicas.
      with_index: whether the number of a replica counts as different.
    """
    body, inputs = compat.sharded_program(flow.open_jaxpr(traced)[0])
    analysis = SamenessAnalysis(
        world.axis_names,
        refuse_divided=False,
        with_index=with_index,
        observed=primitives.DRAWS,
    )
    analysis.follow(body, tuple(map(analysis.mask, inputs)))
    return analysis.observed


class DrawFinder:
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

    def find(self, jaxpr: Any, *, in_loop: bool = False) -> Iterator["Found"]:
        """Yields the draws in a jaxpr, in order."""
        for eqn in filter(self.concerns, flow.open_jaxpr(jaxpr)[0].eqns):
            if eqn.primitive.name in primitives.DRAWS:
                yield Found(eqn, in_loop)
            is_loop = in_loop or eqn.primitive.name in ("scan", "while")
            for inner in filter(self.has_any, jaxprs_in_params(eqn.params)):
                yield from self.find(inner, in_loop=is_loop)


class Found(NamedTuple):
    """A draw in a jaxpr, or in a jaxpr inside it."""

    eqn: Any
    in_loop: bool


def may_grow(found: Found) -> bool:
    """Returns whether a draw may be larger for more samples, or be made more often."""
    shape = Place.find(found.eqn, found.eqn).shape
    return bool(shape) or found.in_loop


def fits_samples(found: Found, lengths: set[int]) -> bool:
    """Returns whether a draw may be for samples, by its shape.

    Args:
      found: the draw.
      lengths: the lengths of a replica's batches.
    """
    shape = Place.find(found.eqn, found.eqn).shape
    return any(size % length == 0 for size in shape for length in lengths)


class Copies:
    """Copies jaxprs with draws, so that no two equations share one.

    The same jaxpr, such as the `jit` in `jax.random.normal`, may be called with keys
    that differ between replicas and with keys that do not.
    """

    def __init__(self) -> None:
        self._finder = DrawFinder()

    def of_value(self, value: Any) -> Any:
        """Returns a parameter of an equation, with its jaxprs copied."""
        if isinstance(value, tuple | list):
            return like(value, [self.of_value(x) for x in value])
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


def like(values: Any, parts: list[Any]) -> Any:
    """Returns a tuple or a list with other values."""
    is_named = hasattr(values, "_fields")  # As in `custom_linear_solve`.
    return type(values)(*parts) if is_named else type(values)(parts)


class Place(NamedTuple):
    """Shapes of one draw: for the samples of a replica, and for the samples of all."""

    shape: tuple[int, ...]  # per key.
    wide_shape: tuple[int, ...]
    grown: tuple[int, ...]  # the dimensions in which these differ.
    keys_grow: bool  # whether there are more keys.

    @classmethod
    def find(cls, eqn: Any, wide: Any) -> "Place":
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
