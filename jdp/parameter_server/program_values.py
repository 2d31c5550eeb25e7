"""Program values: do two programs compute the same value, step by step?

Each value of a jaxpr gets a number. The same operation on values with the same numbers
gets the same number, in every program that one `ProgramValues` sees (value numbering;
Alpern, Wegman and Zadeck, 1988). Parts of a program that a value does not depend on,
such as other leaves, do not matter.
"""

import re
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jdp.backward import flow
from jdp.compat import primitives

_NUM_ITERATIONS = 3  # of loops: dependences between carries show after a few.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class ProgramValues:
    """Numbers the values of programs."""

    def __init__(self):
        self._numbers: dict[Hashable, int] = {}
        self._texts: dict[
            int, tuple[Any, str]
        ] = {}  # by id; holding the equation keeps its id in use.

    def number(self, *key: Hashable) -> int:
        """Returns the number of the value that `key` describes."""
        return self._numbers.setdefault(key, len(self._numbers))

    def of_jaxpr(self, jaxpr: Any, inputs: Sequence[int]) -> list[int]:
        """Returns the numbers of a jaxpr's outputs, given the numbers of its inputs."""
        body, consts = flow.open_jaxpr(jaxpr)
        known = dict(zip(body.invars, inputs, strict=True))
        known.update(zip(body.constvars, map(self._of_constant, consts), strict=True))

        def read(var: Any) -> int:
            return (
                self._of_constant(var.val) if isinstance(var, Literal) else known[var]
            )

        for eqn in body.eqns:
            found = self._of_equation(eqn, [read(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, found, strict=True))
        return [read(v) for v in body.outvars]

    def _of_equation(self, eqn: Any, inputs: Sequence[int]) -> list[int]:
        name = eqn.primitive.name
        if name in primitives.INLINABLE:
            return self.of_jaxpr(flow.called_jaxpr(eqn), inputs)
        if name == "cond":
            index, *operands = inputs
            branches = [self.of_jaxpr(b, operands) for b in eqn.params["branches"]]
            columns = zip(*branches, strict=True)
            return [self.number(name, index, *column) for column in columns]
        if name in ("scan", "while"):
            return self._of_loop(eqn, inputs)
        if name == "optimization_barrier":
            return list(inputs)
        text, num = self._describe(eqn), len(eqn.outvars)
        return [self.number(name, text, k, *inputs) for k in range(num)]

    def _of_loop(self, eqn: Any, inputs: Sequence[int]) -> list[int]:
        loop = flow.loop_shape(eqn)
        skipped = eqn.params.get("cond_nconsts", 0)
        first = skipped + loop.num_consts
        end = first + loop.num_carries
        consts, carries, slices = inputs[skipped:first], inputs[first:end], inputs[end:]
        kind: tuple[Hashable, ...] = (
            eqn.primitive.name,
            eqn.params.get("length"),
            eqn.params.get("reverse"),
        )
        stacked: Sequence[int] = ()
        for _ in range(_NUM_ITERATIONS):
            if "cond_jaxpr" in eqn.params:
                goes_on = [*inputs[:skipped], *carries]
                kind = (*kind, *self.of_jaxpr(eqn.params["cond_jaxpr"], goes_on))
            found = self.of_jaxpr(loop.body, [*consts, *carries, *slices])
            found = [self.number(*kind, x) for x in found]
            carries, stacked = found[: loop.num_carries], found[loop.num_carries :]
        return [*carries, *stacked]

    def _of_constant(self, x: Any) -> int:
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        array = np.asarray(x)
        return self.number("constant", str(array.dtype), array.shape, array.tobytes())

    def _describe(self, eqn: Any) -> str:
        """The parameters of an equation, without the addresses of functions."""
        if id(eqn) not in self._texts:
            text = _ADDRESS.sub("", str(sorted(eqn.params.items())))
            self._texts[id(eqn)] = (eqn, text)
        return self._texts[id(eqn)][1]
