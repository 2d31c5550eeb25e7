"""Chaining: hooks that compress the messages of other hooks."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax

from jdp.hooks import base
from jdp.hooks.base import CommHook, HookAllReduce
from jdp.trees.buckets import BucketAval
from jdp.types import PyTree

T = TypeVar("T")


@overload
def chain(hook: CommHook[T], /) -> CommHook[T]: ...
@overload
def chain(
    first: CommHook[Any], second: CommHook[Any], /, *rest: CommHook[Any]
) -> CommHook[list[Any]]: ...
def chain(*hooks: CommHook[Any]) -> CommHook[Any]:
    """Returns a hook in which each hook compresses the messages of the hook before it.

    `chain(power_sgd(4), cast(jnp.bfloat16))` sends the thin factors in bfloat16;
    `chain(cast(jnp.float16), power_sgd(4))` is torch's `fp16_compress_wrapper`. Errors
    add up. `int8`, `top_k` and `rows` do not communicate by sums, so only one of them
    can be used, as the last hook.

    Args:
      *hooks: one or more hooks.

    Returns:
      The hook; its state is a list of their states.

    Raises:
      TypeError: an argument is not a hook.
      ValueError: there are no hooks, or a hook before the last does not communicate by
        sums: `int8`, `top_k`, `rows`, or (raised by `init`) a hook of your own.
    """
    if not hooks:
        raise ValueError("`chain` needs at least one hook.")
    for hook in hooks:
        if not isinstance(hook, CommHook):
            raise TypeError(
                "`chain` takes hooks, such as `jdp.hooks.cast(jnp.bfloat16)`, got "
                f"{hook!r}."
            )
    first, *rest = hooks
    if not rest:
        return first
    if not first.only_sums:
        raise _not_the_last(first.name)
    inner = chain(*rest)

    def init(avals: Sequence[BucketAval]) -> list[PyTree]:
        return [first.init(avals), [inner.init([a]) for a in _sent(first, avals)]]

    def apply(
        buckets: list[jax.Array], state: list[PyTree], all_reduce: HookAllReduce
    ) -> tuple[list[jax.Array], list[PyTree]]:
        through = _Through(inner, state[1], all_reduce)
        sums, outer_state = first.apply(buckets, state[0], through)
        return sums, [outer_state, through.states]

    name = " + ".join([first.name, inner.name])
    is_elementwise = all(hook.is_elementwise for hook in hooks)
    return CommHook(init, apply, name, inner.only_sums, is_elementwise)


class _OnlySums:
    """Collectives for a hook that is not the last: only sums."""

    def bucket(self, number: int) -> contextlib.AbstractContextManager[None]:
        del number
        return contextlib.nullcontext()

    def exchange(self, rows: jax.Array) -> jax.Array:
        raise _not_the_last()

    def gather(self, x: jax.Array) -> jax.Array:
        raise _not_the_last()


class _Through(_OnlySums):
    """A `HookAllReduce` that sums through another hook, with one state per call."""

    def __init__(self, hook: CommHook, states: list[PyTree], wire: HookAllReduce):
        self._hook = hook
        self._wire = wire
        self._number = 0  # calls so far.
        self.num_replicas = wire.num_replicas
        self.states = list(states)

    def __call__(self, x: jax.Array) -> jax.Array:
        state = self.states[self._number]
        (total,), state = self._hook.apply([x], state, self._wire)
        self.states[self._number] = state
        self._number += 1
        return total

    def bucket(self, number: int) -> contextlib.AbstractContextManager[None]:
        return self._wire.bucket(number)

    def switch(
        self, is_late: jax.Array, late: Callable[[], T], early: Callable[[], T]
    ) -> T:
        states = self.states
        traced: list[Callable[[], T]] = []

        def run(branch: Callable[[], T]) -> Callable[[], tuple[T, list[PyTree]]]:
            def body() -> tuple[T, list[PyTree]]:
                # `init` has counted the calls of `late` first.
                assert branch is late or traced == [late]
                traced.append(branch)
                self.states = list(states)
                return branch(), self.states

            return body

        out, self.states = self._wire.switch(is_late, run(late), run(early))
        return out


class _Listener(_OnlySums):
    """A `HookAllReduce` that records the arrays to be summed, in both branches."""

    num_replicas = 1

    def __init__(self) -> None:
        self.sums: list[jax.ShapeDtypeStruct] = []

    def __call__(self, x: jax.Array) -> jax.Array:
        self.sums.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
        return x

    def switch(
        self, is_late: jax.Array, late: Callable[[], T], early: Callable[[], T]
    ) -> T:
        del is_late
        out = late()
        early()
        return out


def _sent(hook: CommHook, avals: Sequence[BucketAval]) -> list[BucketAval]:
    """Returns the arrays that a hook sums, call by call."""
    listener = _Listener()
    base.trace(hook, avals, listener)
    sums = listener.sums
    is_a_bucket_each = [s.shape for s in sums] == [a.shape for a in avals]
    return [
        BucketAval(avals[i].leaf_shapes if is_a_bucket_each else (s.shape,), s.dtype)
        for i, s in enumerate(sums)
    ]


def _not_the_last(name: str = "") -> ValueError:
    which = f" (`{name}`)" if name else ""
    return ValueError(
        f"`chain`: a hook that is not the last does not sum what it sends{which}, so "
        "the next one cannot compress it. Put `int8`, `top_k` or `rows` at the end."
    )
