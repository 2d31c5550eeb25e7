"""Pieces: a program of whole arrays, run on the part of them that a replica has.

Each array is flat, cut into as many equal pieces as there are replicas, and piece i is
on replica i. What works element by element is run on the pieces. A sum, a maximum or a
minimum of all elements becomes one of what the replicas found. For anything else the
pieces are gathered, and every replica runs it on the whole: the numbers are those of
the whole program in any case.

Equations are run in waves: all that need nothing from other replicas, then one
collective for all that the next wave needs of them. Reads and writes of mutable arrays,
and other effects in order, stay in the order of the program.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import compat
from jdp.backward import flat_program
from jdp.backward.flat_program import Equation, is_literal
from jdp.collectives import base, xla
from jdp.compat import annotations, primitives
from jdp.optimizers import partials, shard_layout
from jdp.optimizers.partials import Partial
from jdp.optimizers.shard_layout import Layout, Piece
from jdp.replicas import mesh
from jdp.types import PyTree

_logger = logging.getLogger("jdp")


def run(
    fn: Callable[..., PyTree], args: PyTree, avals: PyTree, place: Layout
) -> PyTree:
    """Runs `fn(*args)`, of which some leaves are pieces.

    Args:
      fn: a function of whole arrays.
      args: its arguments; a leaf is a `Piece`, or an array that is the same on all.
      avals: the same of the whole arrays.
      place: which replica has which piece.

    Returns:
      What `fn` returns; a leaf is a `Piece`, or an array that is the same on all.

    Raises:
      ValueError: pieces meet an array that `fn` closes over, and which may differ
        between the replicas.
    """
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*avals)
    values = jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, Piece))
    evaluation = _Evaluation(place)
    out = evaluation.run(closed, values)
    return jax.tree.unflatten(jax.tree.structure(shape), out)


_DIFFERS = (
    "A function that the optimizer of `zero1` calls, such as a `value_fn`, closes over "
    "an array that may differ between the replicas, such as their own samples, so that "
    "they would take different steps. Make it with `jdp.mean_loss(loss_fn)`: the "
    "gradient of a `jdp.average` is of one replica alone."
)


class _Evaluation:
    """One run of a program."""

    def __init__(self, place: Layout):
        self._layout = place
        self._known: dict[Any, Any] = {}  # by key.
        # Keys of what `fn` closes over, and of what is made of that alone. A replica
        # may reduce its own samples there, but pieces must not meet them.
        self._foreign: set[Any] = set()

    def run(
        self, closed: Any, args: Sequence[Any], foreign: Sequence[int] = ()
    ) -> list[Any]:
        """Returns the results: pieces or arrays; `foreign` are indices of `args`."""
        program = flat_program.flatten(closed, primitives.INLINABLE)
        self._foreign.update(program.inputs[i] for i in foreign)
        self._known.update(zip(program.inputs, args, strict=True))
        self._known.update(program.constants)
        self._foreign.update(
            key
            for key, value in program.constants.items()
            if isinstance(value, jax.core.Tracer)
        )
        waiting = program.equations
        while waiting:
            waiting = self._wave(waiting)
        self._combine([key for key in program.outputs if not is_literal(key)])
        return [self._same(key, self._read(key)) for key in program.outputs]

    def _read(self, key: Any) -> Any:
        return jnp.asarray(key.val) if is_literal(key) else self._known[key]

    def _wave(self, waiting: list[Equation]) -> list[Equation]:
        """Runs what can be run here; returns the rest, for which others were asked."""
        left, wanted, whole = [], [], []
        is_held = False  # An effect waits, so that those after it wait, too.
        for equation in waiting:
            is_in_order = compat.has_ordered_effect(equation.eqn)
            if (is_in_order and is_held) or any(
                not is_literal(k) and k not in self._known for k in equation.inputs
            ):
                left.append(equation)
                is_held |= is_in_order
                continue
            values = [self._read(key) for key in equation.inputs]
            found = None
            if not self._is_apart(equation, values):
                found = self._local(equation, self._checked(equation, values))
            if found is not None:
                self._known.update(zip(equation.outputs, found, strict=True))
                continue
            left.append(equation)
            is_held |= is_in_order
            for key in self._missing(equation, values):
                if isinstance(self._known[key], Partial):
                    wanted.append(key)
                else:
                    whole.append((key, equation.eqn))
        self._combine(wanted)
        self._gather(whole)
        return left

    def _is_apart(self, equation: Equation, values: list[Any]) -> bool:
        """Whether pieces meet a whole array that may be of a replica's own samples.

        Then all is done on whole arrays, and what comes of it may be averaged.
        """
        if equation.eqn.primitive.name == "cond":
            return False  # Its branches look at what enters them.
        if not any(isinstance(x, Piece) for x in values):
            return False
        pairs = zip(equation.inputs, values, strict=True)
        return any(self._is_foreign(k) and math.prod(x.shape) != 1 for k, x in pairs)

    def _checked(self, equation: Equation, values: list[Any]) -> list[Any]:
        """Sees to it that numbers that pieces meet are the same on all replicas."""
        keys = equation.inputs
        if not any(self._is_foreign(key) for key in keys):
            return values
        if not equation.outputs and equation.eqn.primitive.name != "cond":
            return values  # `jax.debug.print` takes no part in what replicas do.
        if not any(isinstance(x, Piece | Partial) for x in values):
            self._foreign.update(equation.outputs)
            # What is written may be read later.
            self._foreign.update(
                key for key, x in zip(keys, values, strict=True) if compat.is_mutable(x)
            )
            return values
        count = 1 if equation.eqn.primitive.name == "cond" else len(values)
        pairs = zip(keys[:count], values[:count], strict=True)
        return [self._same(key, x) for key, x in pairs] + values[count:]

    def _is_foreign(self, key: Any) -> bool:
        return not is_literal(key) and key in self._foreign

    def _same(self, key: Any, x: Any) -> Any:
        if not self._is_foreign(key) or isinstance(x, Piece) or compat.is_mutable(x):
            return x
        names = mesh.as_axis_names(self._layout.axis_name)
        return annotations.expect_same(x, names, _DIFFERS)

    def _missing(self, equation: Equation, values: list[Any]) -> list[Any]:
        """Returns keys of what an equation wants of other replicas, first of all."""
        keys = equation.inputs
        pairs = list(zip(keys, values, strict=True))
        found = [key for key, x in pairs if isinstance(x, Partial)]
        if found:
            return found
        if equation.eqn.primitive.name == "cond" and isinstance(values[0], Piece):
            return keys[:1]
        found = [key for key, x in pairs if isinstance(x, Piece)]
        if self._is_elementwise(equation.eqn):
            # Scalars beside arrays. One replica alone has the piece of a scalar.
            shapes = {x.shape for x in values}
            if len(shapes) > 1:
                return [k for k in found if self._known[k].shape == ()] or found
        return found

    def _local(self, equation: Equation, values: list[Any]) -> list[Any] | None:
        """Runs an equation; returns None if it wants something of other replicas."""
        eqn = equation.eqn
        name = eqn.primitive.name
        if any(isinstance(x, Partial) for x in values):
            return self._linear(name, eqn, values)
        if not any(isinstance(x, Piece) for x in values):
            return compat.bind_equation(eqn, values)
        if name == "cond":
            foreign = [self._is_foreign(key) for key in equation.inputs[1:]]
            return self._cond(eqn, values, foreign)
        if self._is_elementwise(eqn):
            return self._elementwise(eqn, values)
        if name in primitives.RESHAPES:
            (piece,) = values
            return [Piece(piece.data, eqn.outvars[0].aval.shape)]
        return self._reduction(name, eqn, values)

    def _is_elementwise(self, eqn: Any) -> bool:
        if eqn.primitive.name == "bitcast_convert_type":
            # To another width, it adds a dimension or takes one away.
            return eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
        return eqn.primitive.name in primitives.ELEMENTWISE

    def _linear(self, name: str, eqn: Any, values: list[Any]) -> list[Any] | None:
        """Sums of partial sums are partial sums, and so are multiples of one.

        Integers wrap around in any order, but their quotients are truncated. Floats of
        less than 32 bits are multiplied once they are whole: their parts may round to
        zero or overflow.
        """
        if name not in (*primitives.ADDITIONS, "mul", "div", *primitives.RESHAPES):
            return None
        are_partial = [isinstance(x, Partial) for x in values]
        parts = [x for x in values if isinstance(x, Partial)]
        if any(isinstance(x, Piece) for x in values) or any(
            x.op != "sum" for x in parts
        ):
            return None
        aval = eqn.outvars[0].aval
        if aval.size != 1:  # To send it would take longer.
            return None
        is_exact = jnp.issubdtype(aval.dtype, jnp.integer)
        is_wide = not is_exact and jnp.finfo(aval.dtype).bits >= 32
        if name in (*primitives.ADDITIONS, *primitives.RESHAPES):
            # What is whole is added on one replica.
            is_first = self._layout.rank == 0
            operands = [
                x.data if is_partial else jnp.where(is_first, x, jnp.zeros_like(x))
                for x, is_partial in zip(values, are_partial, strict=True)
            ]
        elif (
            (name == "mul" and len(parts) == 1 and (is_wide or is_exact))
            or (name == "div" and are_partial == [True, False] and is_wide)
        ) and self._is_plain(eqn.invars[1 - are_partial.index(True)]):
            operands = [x.data if isinstance(x, Partial) else x for x in values]
        else:
            return None
        names = self._layout.tracked_axes
        operands = compat.cast_alike(operands, sorted(names))
        (out,) = compat.bind_equation(eqn, operands)
        return [Partial(out, "sum")]

    def _is_plain(self, atom: Any) -> bool:
        """Whether it is a number that makes no NaN of a partial sum of zero."""
        return is_literal(atom) and bool(np.isfinite(atom.val)) and atom.val != 0

    def _elementwise(self, eqn: Any, values: list[Any]) -> list[Any] | None:
        shape = next(x.shape for x in values if isinstance(x, Piece))
        if any(
            x.shape != shape and (isinstance(x, Piece) or x.shape != ()) for x in values
        ):
            return None
        operands = []
        for x in values:
            if isinstance(x, Piece):
                operands.append(x.data)
            elif x.shape == shape and shape:
                operands.append(self._layout.cut(x).data)
            else:  # A scalar, or a scalar beside pieces of a scalar.
                operands.append(x)
        row = (1, self._layout.width(shape))
        if eqn.primitive.name not in ("clamp", "select_n"):
            operands = [_broadcast(x, row) for x in operands]
        elif eqn.primitive.name == "select_n":  # Its predicate may be a scalar.
            operands = [
                x if i == 0 and x.ndim == 0 else _broadcast(x, row)
                for i, x in enumerate(operands)
            ]
        else:
            low, x, high = operands
            operands = [low, _broadcast(x, row), high]
        names = self._layout.tracked_axes
        operands = compat.cast_alike(operands, sorted(names))
        return [Piece(out, shape) for out in compat.bind_equation(eqn, operands)]

    def _reduction(self, name: str, eqn: Any, values: list[Any]) -> list[Any] | None:
        """Reduces all elements of pieces, so that only the others' part is missing."""
        op = primitives.REDUCTIONS.get(name)
        if op is not None:
            (piece,) = values
            left = [d for i, d in enumerate(piece.shape) if i not in eqn.params["axes"]]
            dtype = piece.data.dtype
            if name in ("reduce_and", "reduce_or") and dtype != jnp.bool_:
                return None
            if math.prod(left) != 1 or not partials.has_parts(dtype, op):
                return None
            data = self._layout.mask(piece, partials.neutral(dtype, op))
            return [partials.reduce_elements(data, op, left)]
        if name == "dot_general":
            a, b = values
            (contracted, _), _ = eqn.params["dimension_numbers"]
            is_whole = isinstance(a, Piece) and isinstance(b, Piece)
            if is_whole and a.shape == b.shape and len(contracted) == len(a.shape):
                (_, others), _ = eqn.params["dimension_numbers"]
                dtype = eqn.outvars[0].aval.dtype
                has_parts = partials.has_parts(dtype, "sum")
                if tuple(contracted) == tuple(others) and has_parts:
                    wide = base.accumulator(dtype, "sum")
                    products = a.data.astype(wide) * b.data.astype(wide)
                    products = self._layout.mask(Piece(products, a.shape), 0)
                    return [Partial(products.sum().astype(dtype), "sum")]
        return None

    def _cond(
        self, eqn: Any, values: list[Any], foreign: list[bool]
    ) -> list[Any] | None:
        """A branch that all replicas take alike."""
        index, *operands = values
        if isinstance(index, Piece) or any(compat.is_mutable(x) for x in operands):
            return None
        shapes = [x.shape if isinstance(x, Piece) else None for x in operands]
        arrays = [x.data if isinstance(x, Piece) else x for x in operands]
        closed_over = [i for i, is_foreign in enumerate(foreign) if is_foreign]
        # A result is in pieces where it is so on either branch.
        kinds: list[list[bool]] = []

        def take(branch: Any, split: list[bool] | None, *arrays: Any) -> list[Any]:
            given = [
                x if shape is None else Piece(x, shape)
                for x, shape in zip(arrays, shapes, strict=True)
            ]
            out = _Evaluation(self._layout).run(branch, given, closed_over)
            kinds.append([isinstance(x, Piece) for x in out])
            if split is None:
                return [x.data if isinstance(x, Piece) else x for x in out]
            return [
                x.data
                if isinstance(x, Piece)
                else self._layout.cut(x).data
                if is_split
                else x
                for x, is_split in zip(out, split, strict=True)
            ]

        branches = eqn.params["branches"]
        for branch in branches:
            jax.eval_shape(functools.partial(take, branch, None), *arrays)
        split = [any(column) for column in zip(*kinds, strict=True)]
        names = sorted(self._layout.tracked_axes)

        def run(branch: Any) -> Callable[..., list[Any]]:
            def body(*arrays: Any) -> list[Any]:
                out = take(branch, split, *arrays)
                return [
                    compat.cast_varying(x, names) if s else x
                    for x, s in zip(out, split, strict=True)
                ]

            return body

        out = lax.switch(index.astype(jnp.int32), [run(b) for b in branches], *arrays)
        return [
            Piece(x, var.aval.shape) if is_split else x
            for x, is_split, var in zip(out, split, eqn.outvars, strict=True)
        ]

    def _combine(self, keys: Sequence[Any]) -> None:
        """Combines what replicas have found, in a collective an operation and dtype."""
        keys = [k for k in dict.fromkeys(keys) if isinstance(self._known[k], Partial)]
        found = partials.combine(
            [self._known[key] for key in keys], self._layout.axis_name
        )
        self._known.update(zip(keys, found, strict=True))

    def _gather(self, wanted: Sequence[tuple[Any, Any]]) -> None:
        """Puts pieces together on all replicas, in a collective a dtype."""
        groups: dict[Any, list[Any]] = {}
        for key, eqn in wanted:
            value = self._known[key]
            if isinstance(value, Piece) and key not in groups.get(value.data.dtype, ()):
                _logger.debug(
                    "Gathering an array of shape %s for `%s`.",
                    value.shape,
                    eqn.primitive.name,
                )
                groups.setdefault(value.data.dtype, []).append(key)
        for members in groups.values():
            pieces = [self._known[key] for key in members]
            wholes = shard_layout.gather(pieces, self._layout, xla.PSUM)
            self._known.update(zip(members, wholes, strict=True))


def _broadcast(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # `jnp.broadcast_to` takes 0.1 ms to find that there is nothing to do.
    return x if x.shape == shape else jnp.broadcast_to(x, shape)
