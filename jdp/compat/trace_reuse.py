"""Trace reuse: facts beside the arguments on which a traced function depends.

JAX traces a nested `jit`, `checkpoint` or loop body once, and takes that trace again
where the same function gets arguments of the same types. It does not know that the
functions of jdp also depend on the step they are called from: on the weight of a
`jdp.Join`, for example. A value in JAX's trace context makes it know.
"""

import contextlib
import itertools
from collections.abc import Iterator

import jax

_fact = jax.make_user_context()
_numbers = itertools.count(1)


@contextlib.contextmanager
def only_here() -> Iterator[None]:
    """Functions traced in this context are traced again elsewhere, and the reverse.

    Operations outside of a trace are compiled again, too: use it while tracing.
    """
    with _fact(next(_numbers)):
        yield
