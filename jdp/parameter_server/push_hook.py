"""Push hook: how does a push go through a communication hook?

A hook sums over replicas. Here there is one replica, and the arrays that the hook would
send are pushed. The worker runs the hook and records the arrays that it sends. The
server runs the hook again, on zeros, and replaces the arrays that it sends by the
recorded ones. So the server repeats all that the hook does with sent arrays, such as
putting chosen elements in their places.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jdp.hooks import CommHook
from jdp.parameter_server import shards
from jdp.parameter_server.shards import MemoryLayout
from jdp.trees.buckets import BucketAval
from jdp.types import PyTree

T = TypeVar("T")


class _Recorder:
    """A `HookAllReduce` of one replica that keeps the arrays that the hook sends.

    Attributes:
      sent: arrays in the order in which the hook sent them.
    """

    def __init__(self, receive: Callable[[jax.Array], jax.Array] = lambda x: x) -> None:
        """`receive` maps each sent array to the array that the hook gets back."""
        self.num_replicas = 1
        self.sent: list[jax.Array] = []
        self._receive = receive
        self._has_exchanged = False

    def __call__(self, x: jax.Array) -> jax.Array:
        return self._send(x)

    def exchange(self, rows: jax.Array) -> jax.Array:
        self._has_exchanged = True
        return self._send(rows)

    def gather(self, x: jax.Array) -> jax.Array:
        # After an exchange, the hook gathers the sum, which the server computes.
        if self._has_exchanged:
            self._has_exchanged = False
            return x[None]
        return self._send(x)[None]

    def bucket(self, number: int) -> contextlib.AbstractContextManager[None]:
        del number
        return contextlib.nullcontext()

    def switch(
        self, is_late: jax.Array, late: Callable[[], T], early: Callable[[], T]
    ) -> T:
        del is_late, late, early
        raise NotImplementedError("A hook with a warm-up cannot compress a push.")

    def _send(self, x: jax.Array) -> jax.Array:
        self.sent.append(x)
        return self._receive(x)


def _make_player(received: Sequence[jax.Array]) -> _Recorder:
    """Makes a recorder that returns `received` in place of the sent arrays."""
    left = list(received)
    return _Recorder(lambda _: left.pop(0))


class _HookCodec:
    """Encoder and decoder of a hook, for buckets of given shapes."""

    def __init__(self, hook: CommHook, avals: Sequence[BucketAval]) -> None:
        self._hook = hook
        self._avals = [BucketAval(a.leaf_shapes, a.dtype) for a in avals]

    def init(self) -> PyTree:
        return self._hook.init(self._avals)

    def encode(
        self, buckets: Sequence[jax.Array], state: PyTree
    ) -> tuple[list[jax.Array], list[jax.Array], PyTree]:
        """Returns the arrays that the hook sends, its result, and its next state."""
        recorder = _Recorder()
        found, state = self._hook.apply(list(buckets), state, recorder)
        return recorder.sent, found, state

    def decode(self, sent: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the result of the hook when it sent these arrays."""
        zeros = [jnp.zeros(a.shape, a.dtype) for a in self._avals]
        found, _ = self._hook.apply(zeros, self.init(), _make_player(sent))
        return found

    def sends_what_it_received(self) -> bool:
        """Whether a sent array depends on an array received before."""
        buckets = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self._avals]
        sent, _, _ = jax.eval_shape(lambda x: self.encode(x, self.init()), buckets)

        def resend(received: list[jax.Array], x: list[jax.Array]) -> list[jax.Array]:
            player = _make_player(received)
            self._hook.apply(list(x), self.init(), player)
            return player.sent

        jaxpr = jax.make_jaxpr(resend)(sent, buckets).jaxpr
        # By id, since literals are not hashable.
        received = {id(var) for var in jaxpr.invars[: len(sent)]}
        for eqn in jaxpr.eqns:
            if any(id(var) in received for var in eqn.invars):
                received.update(map(id, eqn.outvars))
        return any(id(var) in received for var in jaxpr.outvars)


class Compressor:
    """A hook for the buckets of one server."""

    def __init__(self, hook: CommHook, avals: Sequence[BucketAval]):
        """Traces the arrays that the hook sends.

        Args:
          hook: a hook whose result follows from the arrays it sends: `cast`, `int8` or
            `top_k`.
          avals: shapes and dtypes of the buckets.

        Raises:
          ValueError: the result does not follow from the sent arrays alone.
        """
        _check_is_made_of_what_it_sends(hook, avals)
        self._codec = codec = _HookCodec(hook, avals)
        zeros = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        sent, _, _ = jax.eval_shape(lambda x: codec.encode(x, codec.init()), zeros)
        self.layout: MemoryLayout = shards.make_layout(sent)
        self._unpack = jax.jit(codec.decode)

    def init(self) -> PyTree:
        """Returns the state of the hook before the first push."""
        return self._codec.init()

    def compress(
        self, buckets: Sequence[jax.Array], state: PyTree
    ) -> tuple[list[jax.Array], PyTree]:
        """Returns the arrays to push for `buckets`, and the next state; traced."""
        sent, _, state = self._codec.encode(buckets, state)
        return sent, state

    def unpack(self, sent: Sequence[np.ndarray]) -> list[jax.Array]:
        """Returns the buckets, shape (n,) each, from the pushed arrays."""
        found = self._unpack(list(sent))
        # `sent` may be a view of memory that the next push overwrites.
        return jax.block_until_ready(found)


def open_payload(
    payload: Any,
    is_compressed: bool,
    layout: MemoryLayout,
    compressor: Compressor | None,
) -> list[Any]:
    """Returns the buckets of a push; views, not copies, if it is not compressed."""
    if not is_compressed:
        return list(layout.views(payload))
    assert compressor is not None
    return compressor.unpack(compressor.layout.views(payload))


def _check_is_made_of_what_it_sends(
    hook: CommHook, avals: Sequence[BucketAval]
) -> None:
    """Checks the hook's program, and runs it on the first elements of each bucket.

    A sent array must not depend on an array received before, as the second factor of
    `power_sgd` does: the server would have to recompute the first one bit for bit.
    """
    rng = np.random.default_rng(0)
    small = [BucketAval([(min(64, a.size),)], a.dtype) for a in avals]
    codec = _HookCodec(hook, small)
    x = [jnp.asarray(rng.normal(size=a.shape), a.dtype) for a in small]

    def run(x: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        sent, found, _ = codec.encode(x, codec.init())
        return found, codec.decode(sent)

    try:
        pairs = zip(*jax.jit(run)(x), strict=True)
        same = all(np.allclose(a, b, rtol=1e-2) for a, b in pairs)
        same = same and not _HookCodec(hook, avals).sends_what_it_received()
    except (NotImplementedError, IndexError):
        same = False
    if not same:
        raise ValueError(
            f"The hook `{hook.name}` cannot compress a push: its result does not "
            "follow from the arrays it sends alone. Use `cast`, `int8` or `top_k`."
        )
