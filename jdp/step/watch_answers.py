"""Watch answers: what does the program of a step tell about the values it watches?"""

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params

from jdp import compat
from jdp.backward import flow
from jdp.collectives import auto
from jdp.compat import annotations
from jdp.gradients.watched_values import Answer, WatchedValues
from jdp.replicas.mesh import World
from jdp.step.sameness import SamenessAnalysis

_Shape = tuple[int, ...]


def find(
    traced: Any,
    take_parts: Callable[[Any], Any],
    world: World,
    watched: WatchedValues,
    lengths: Collection[int],
    trace_wide: Callable[[], WatchedValues],
) -> WatchedValues:
    """Returns the answers for the next trace of a step.

    Args:
      traced: closed jaxpr with the `shard_map` of the step.
      take_parts: returns the program in which each replica draws for its own samples,
        so that what is drawn differs.
      world: the replicas.
      watched: the values that this trace watches.
      lengths: the lengths of a replica's batches.
      trace_wide: traces the step with the samples of all replicas on each.
    """
    with warnings.catch_warnings(), contextlib.suppress(ValueError):
        warnings.simplefilter("ignore")
        traced = take_parts(traced)  # An error is raised for the next trace.
    differ = _find_differences(traced, world)
    try:
        with warnings.catch_warnings(), auto.without_measuring():
            warnings.simplefilter("ignore")
            wide = trace_wide().shapes
    except Exception:  # The user's code, with more samples.
        wide = None
    if wide is not None and [len(x) for x in wide] != [len(x) for x in watched.shapes]:
        wide = None

    def answer(number: int, place: int, shape: _Shape) -> Answer:
        found = differ.get((number, place), {True})
        differs = None if len(found) > 1 else True in found
        if wide is None:  # Only the length tells.
            is_long = bool(shape) and shape[0] in lengths and differs is not False
            return Answer(shape, differs, 0 if is_long else None)
        dim = _grown_dim(shape, wide[number][place], world.num_replicas)
        length = 0 if dim is None else shape[dim]
        has_all = length not in lengths and length in {
            world.num_replicas * k for k in lengths
        }
        return Answer(shape, differs, dim, has_all)

    return WatchedValues(
        [
            tuple(answer(number, i, shape) for i, shape in enumerate(shapes))
            for number, shapes in enumerate(watched.shapes)
        ]
    )


def _find_differences(traced: Any, world: World) -> dict[tuple[int, int], set[bool]]:
    """Returns per watched value whether it differs, in each call it is made in."""
    body, inputs = compat.sharded_program(flow.open_jaxpr(traced)[0])
    analysis = SamenessAnalysis(
        world.axis_names, refuse_divided=False, observed={annotations.WATCHED}
    )
    analysis.follow(body, tuple(map(analysis.mask, inputs)))
    found: dict[tuple[int, int], set[bool]] = {}
    for eqn in _watching(body, set()):
        key = eqn.params["number"], eqn.params["place"]
        always = analysis.observed.get(id(eqn), [True])[0]
        ever = analysis.observed_once.get(id(eqn), [True])[0]
        found.setdefault(key, set()).update((always, ever))
    return found


def _watching(jaxpr: Any, visited: set[int]) -> Iterator[Any]:
    """Yields the equations that watch a value, at any depth."""
    body, _ = flow.open_jaxpr(jaxpr)
    if id(body) in visited:
        return
    visited.add(id(body))
    for eqn in body.eqns:
        if eqn.primitive.name == annotations.WATCHED:
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _watching(inner, visited)


def _grown_dim(shape: _Shape, wide: _Shape, num_replicas: int) -> int | None:
    """Returns the only dimension that is `num_replicas` times as long in `wide`."""
    if len(shape) != len(wide):
        return None
    pairs = enumerate(zip(shape, wide, strict=True))
    grown = [i for i, (a, b) in pairs if a != b]
    is_one = len(grown) == 1 and wide[grown[0]] == num_replicas * shape[grown[0]]
    return grown[0] if is_one else None
