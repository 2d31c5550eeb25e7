"""Base: the contract of a communication hook, and the collectives that it may use.

A hook is a pair of pure functions that sum the buckets of all replicas:

- `init(avals) -> state` makes the state from the sizes of the buckets. Parts that
  differ between replicas, such as rounding errors, are in a `jdp.PerReplica`; the rest
  is the same on all replicas. A hook without a state returns `()`.
- `apply(buckets, state, all_reduce) -> (buckets, state)` is called by every replica
  once per step. Buckets are flat buffers, shape (n,), of this replica's own gradients,
  not divided by anything. `apply` returns their sums over the replicas, the same on
  all; jdp divides them to the mean. A hook communicates through `all_reduce` only.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from typing_extensions import TypeVar

from jdp import compat
from jdp.collectives import auto, base, xla
from jdp.collectives.auto import AutoAllReduce
from jdp.trees.buckets import BucketAval
from jdp.types import AllReduce, AxisName

T = TypeVar("T")
State = TypeVar("State", default=Any)
State_co = TypeVar("State_co", covariant=True)

_NOTHING = contextlib.nullcontext()
_MOST_UNROLLED = 64  # rows; each is an operation of the program.


class HookAllReduce(Protocol):
    """Collectives that a hook may use; every replica makes the same calls."""

    num_replicas: int

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the sum of `x`, shape (n,), over the replicas, in its dtype.

        Sums of 16-bit floats are computed in float32 and rounded once.
        """
        ...

    def exchange(self, rows: jax.Array) -> jax.Array:
        """Sends row i of `rows`, shape (num_replicas, m), to replica i.

        Returns:
          Shape (num_replicas, m): row i was sent by replica i.
        """
        ...

    def gather(self, x: jax.Array) -> jax.Array:
        """Returns `x`, shape (m,), of all replicas, shape (num_replicas, m)."""
        ...

    def bucket(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Names the operations inside by a bucket, in profiles and dumps of XLA.

        Args:
          number: index of the bucket in the list that `apply` was given.
        """
        ...

    def switch(
        self, is_late: jax.Array, late: Callable[[], T], early: Callable[[], T]
    ) -> T:
        """Returns what `late` returns, or `early` where `is_late` is False.

        For hooks with a warm-up. Both functions may communicate; `is_late`, bool (), is
        the same on all replicas. `measure` counts the bytes of `late`.
        """
        ...


class HookInit(Protocol[State_co]):
    """Makes the state of a hook."""

    def __call__(self, avals: Sequence[BucketAval], /) -> State_co:
        """Returns the state of one replica before the first step."""
        ...


class HookApply(Protocol[State]):
    """Sums buckets over the replicas."""

    def __call__(
        self, buckets: list[jax.Array], state: State, all_reduce: HookAllReduce, /
    ) -> tuple[list[jax.Array], State]:
        """Returns the sums, in the shapes and dtypes of `buckets`, and the state."""
        ...


class CommHook(NamedTuple, Generic[State]):
    """A pair of pure functions around the all-reduce of the buckets."""

    init: HookInit[State]
    apply: HookApply[State]
    name: str = "custom"  # label in tables.
    # Whether it communicates by sums only, so that `chain` can put a hook after it.
    only_sums: bool = True
    # Whether each element of the sums depends on the same element of the buckets alone.
    # A step with `num_shards` takes no other hooks.
    is_elementwise: bool = True


def check_hook(hook: Any) -> None:
    """Raises TypeError unless `hook` is a `CommHook`."""
    if not isinstance(hook, CommHook):
        raise TypeError(
            "`hook` must be a `jdp.hooks.CommHook`, such as `jdp.hooks.int8()`, got "
            f"{hook!r}."
        )


class ErrorFeedbackState(NamedTuple):
    """Gradients not sent yet (Seide et al., 2014; Karimireddy et al., 2019)."""

    # PerReplica of a list: per bucket shape (n,), dtype of the bucket, or None for a
    # bucket that is not compressed.
    residuals: Any


class Wire:
    """A `HookAllReduce` over the replicas of an axis."""

    def __init__(
        self,
        axis_name: AxisName,
        all_reduce: AllReduce | None = None,
        names: Sequence[str] = (),
    ):
        """Communicates over an axis.

        Args:
          axis_name: the axis.
          all_reduce: sums buffers; None: XLA's collectives.
          names: name scope of each bucket.
        """
        self._axis_name = axis_name
        self._all_reduce = all_reduce or xla.PLAIN
        is_auto = isinstance(self._all_reduce.reduce, AutoAllReduce)
        self._halves = auto.choose_halves(axis_name) if is_auto else xla.PSUM
        self.num_replicas = compat.axis_size(axis_name)
        self._names = names

    def __call__(self, x: jax.Array) -> jax.Array:
        """Implements `HookAllReduce`."""
        x = base.cast_varying(x, self._axis_name)
        all_reduce = self._all_reduce
        if all_reduce.choose is not None:
            buffer = jax.ShapeDtypeStruct(x.shape, x.dtype)
            all_reduce = all_reduce.choose(buffer, self._axis_name)
        if all_reduce is not xla.PLAIN:
            return all_reduce.reduce(x, self._axis_name)
        if not _is_narrow(x.dtype) or self.num_replicas == 1:
            return lax.psum(x, self._axis_name)
        # XLA on CPU sends 16-bit floats as float32; other backends may sum in 16 bits.
        # A reduce-scatter and all-gather send 16 bits and round once.
        rows = base.pad(x, self.num_replicas).reshape(self.num_replicas, -1)
        part = sum_rows(self.exchange(rows)).astype(x.dtype)
        whole = self.gather(part).reshape(-1)[: x.size]
        return base.replicated(whole, self._axis_name)

    def exchange(self, rows: jax.Array) -> jax.Array:
        """Implements `HookAllReduce`."""
        rows = base.cast_varying(rows, self._axis_name)
        return _as_bits(lambda x: base.all_to_all(x, self._axis_name), rows)

    def gather(self, x: jax.Array) -> jax.Array:
        """Implements `HookAllReduce`."""
        x = base.cast_varying(x, self._axis_name)
        whole = _as_bits(lambda x: self._halves.all_gather(x, self._axis_name), x)
        return whole.reshape(self.num_replicas, -1)

    @contextlib.contextmanager
    def bucket(self, number: int) -> Iterator[None]:
        """Implements `HookAllReduce`; a hook within another's bucket adds no name."""
        names, self._names = self._names, ()
        try:
            with jax.named_scope(names[number]) if names else _NOTHING:
                yield
        finally:
            self._names = names

    def switch(
        self, is_late: jax.Array, late: Callable[[], T], early: Callable[[], T]
    ) -> T:
        """Implements `HookAllReduce`."""
        branches = [late, early]
        return lax.cond(is_late, *compat.cast_branches(branches, (), self._axis_name))


class Meter:
    """A `HookAllReduce` that sends nothing and counts the bytes it would send."""

    def __init__(self, num_replicas: int):
        self.num_replicas = num_replicas
        self.num_bytes = 0.0  # sent by one replica.

    def __call__(self, x: jax.Array) -> jax.Array:
        """Counts a bandwidth-optimal all-reduce: 2 (n - 1) / n of the bytes."""
        share = (self.num_replicas - 1) / self.num_replicas
        self.num_bytes += 2 * share * x.nbytes
        return x

    def exchange(self, rows: jax.Array) -> jax.Array:
        """Counts the rows for other replicas."""
        self.num_bytes += (self.num_replicas - 1) / self.num_replicas * rows.nbytes
        return rows

    def gather(self, x: jax.Array) -> jax.Array:
        """Counts a ring: a replica sends its own data, and forwards the rest."""
        self.num_bytes += (self.num_replicas - 1) * x.nbytes
        return jnp.broadcast_to(x, (self.num_replicas, *x.shape))

    def bucket(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Does nothing."""
        del number
        return _NOTHING

    def switch(
        self, is_late: jax.Array, late: Callable[[], T], early: Callable[[], T]
    ) -> T:
        """Counts `late`, the branch of most steps."""
        del is_late, early
        return late()


def measure(hook: CommHook, avals: Sequence[BucketAval], num_replicas: int) -> Meter:
    """Returns the bytes that one replica sends per step; computes nothing."""
    meter = Meter(num_replicas)
    trace(hook, avals, meter)
    return meter


def trace(
    hook: CommHook, avals: Sequence[BucketAval], all_reduce: HookAllReduce
) -> None:
    """Traces a hook, so that it makes its calls of `all_reduce`; computes nothing."""

    # A new function for each call, because JAX caches traces by function.
    def run(buckets: list[jax.Array]) -> Any:
        return hook.apply(buckets, hook.init(avals), all_reduce)

    jax.eval_shape(run, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals])


def is_real(dtype: Any) -> bool:
    """Whether a dtype is real and floating; other dtypes are not compressed."""
    return jnp.issubdtype(dtype, jnp.floating)


def map_buckets(
    fn: Callable[..., T], all_reduce: HookAllReduce, *lists: Sequence[Any]
) -> list[T]:
    """Returns `fn` of each bucket, and of the elements of further lists.

    Args:
      fn: function of one element of each list, which may communicate.
      all_reduce: the collectives, which name what it does by the bucket.
      *lists: the buckets that `apply` was given, and lists with an element per bucket.
    """
    found = []
    for number, each in enumerate(zip(*lists, strict=True)):
        with all_reduce.bucket(number):
            found.append(fn(*each))
    return found


def sum_rows(rows: jax.Array) -> jax.Array:
    """Sums rows, shape (r, m), in float32; returns shape (m,)."""
    rows = rows.astype(jnp.float32)
    if len(rows) > _MOST_UNROLLED:
        return rows.sum(0)
    # XLA on CPU takes 40 times as long for a reduction over the first dimension.
    return functools.reduce(operator.add, rows)


def _is_narrow(dtype: Any) -> bool:
    return is_real(dtype) and jnp.finfo(dtype).bits == 16


def _as_bits(send: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Sends 16-bit floats as integers with the same bits, which XLA does not widen."""
    if not _is_narrow(x.dtype):
        return send(x)
    sent = send(lax.bitcast_convert_type(x, jnp.uint16))
    return lax.bitcast_convert_type(sent, x.dtype)
