"""Join context: which processes still iterate, and what do the others do meanwhile?

A process that has joined runs the main hooks of its joinables once per iteration of the
others. With `throw_on_early_termination`, each process waits for all others in each
iteration, and all raise as soon as one has joined.
"""

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple

from jdp.join.progress_exchange import ProcessProgress, ProgressExchange
from jdp.replicas.joinable import Joinable, as_list, common_world, make_hooks

_SKEW_WARNING = 1000  # iterations; as in torch's Join.


class JoinTask(NamedTuple):
    """Next action of a process that has joined."""

    kind: Literal["shadow", "wait", "end"]
    process: int = -1  # the process to wait for.


def next_task(num_shadowed: int, progress: Sequence[ProcessProgress]) -> JoinTask:
    """Returns the next action of a joined process; pure.

    Args:
      num_shadowed: iterations that this process has begun or shadowed.
      progress: per process, a lower bound of its progress.
    """
    if any(p.num_begun > num_shadowed for p in progress):
        return JoinTask("shadow")
    going_on = [i for i, p in enumerate(progress) if not p.is_joined]
    return JoinTask("wait", going_on[0]) if going_on else JoinTask("end")


def find_last_joiner(progress: Sequence[ProcessProgress]) -> int:
    """Returns the process with the most iterations; on a tie, the last one. Pure."""
    return max(range(len(progress)), key=lambda i: (progress[i].num_begun, i))


class Join:
    """A context in which processes may have different numbers of iterations.

    A process whose input has ended leaves the context. On exit it runs the main hooks
    of its joinables once per remaining iteration of the others. When all processes have
    joined, all run the post hooks.

        with jdp.Join([step]):
            for batch in batches:  # the number may differ between processes.
                state, metrics = step(state, batch)
        state = step.last_state

    Every process must enter it. If one process raises inside of it, the others raise
    when they come to an iteration that the failed process never begins. A process that
    waits for the failed one in a collective is ended after `world.timeout_s` seconds. A
    joined process waits up to 12 times `timeout_s` for an iteration of another one,
    with a warning each time, and then raises RuntimeError. For a plain train step, and
    for batches of different sizes, `jdp.join_batches` does more.

    Args:
      joinables: at least one, all of one world, such as a decorated train step. Their
        hooks run in this order. Only the first one has to notify the context.
      enable: False: the context only keeps `last_state`. For inputs that are known to
        be even.
      throw_on_early_termination: whether all processes raise RuntimeError as soon as
        one has no more input while others do. Each iteration then waits on the host for
        all processes.
      **kwargs: options of the joinables; each `join_hook` gets the options that it
        takes. A decorated train step takes two:
        `divide_by`: divisor of the sums of gradients and metrics, as in
        `jdp.sync_gradients`; "weight" by default. As each replica with data has the
        same weight, "weight" and "active" are equivalent. "world" divides by the number
        of all replicas.
        `example`: arguments of a call, `(state, *batches)`, for a process that might
        have no batch at all. The values of the batches are not used.

    Attributes:
      last_joiner: index of the process with the most iterations, on a tie the highest;
        None until all processes have joined.
      is_enabled: as `enable`.

    Raises:
      ValueError: there is no joinable, or they have different worlds.
      TypeError: an element is not a joinable, or no joinable takes an option.
      RuntimeError: on entering: a joinable is in another `Join`. Inside of it and on
        leaving: another process failed; or, with `throw_on_early_termination`, a
        process has no more input.
    """

    last_joiner: int | None = None

    def __init__(
        self,
        joinables: Sequence[Joinable],
        *,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ):
        self._joinables = as_list(joinables)
        self._world = common_world(self._joinables)
        self.is_enabled = enable
        self._throws = throw_on_early_termination
        self._hooks = make_hooks(self._joinables, kwargs)
        self._exchange: ProgressExchange | None = None

    @staticmethod
    def notify_join_context(joinable: Joinable) -> None:
        """Tells the context of `joinable`, if there is one, that an iteration begins.

        Call it in each iteration, before any communication. It does nothing for
        joinables that are not the first of their context.

        Raises:
          RuntimeError: a process left with an exception; or, with
            `throw_on_early_termination`, a process has no more input.
        """
        if joinable.join_context is not None:
            joinable.join_context.notify(joinable)

    def notify(self, joinable: Joinable) -> None:
        """Begins an iteration, if `joinable` is the first of this context."""
        if joinable is not self._joinables[0] or self._exchange is None:
            return
        self._exchange.begin()
        if self._throws and any(p.is_joined for p in self._exchange.meet()):
            raise RuntimeError(
                "Detected at least one rank that exhausted inputs. Throwing across all "
                "ranks."
            )

    def __enter__(self) -> "Join":
        for joinable in self._joinables:
            if joinable.join_context is not None:
                raise RuntimeError(
                    f"`{joinable!r}` is in another `Join` already; leave that first."
                )
        for joinable in self._joinables:
            joinable.join_context = self
        if self.is_enabled:
            self._exchange = ProgressExchange(self._world, posts_always=self._throws)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Joins: shadows the iterations of the others, then ends together with them."""
        exchange = self._exchange
        try:
            if exchange is None:
                return
            if error is None:
                self._join(exchange)
            else:
                exchange.leave(error)
        except BaseException as failure:
            assert exchange is not None
            exchange.leave(failure)
            raise
        finally:
            self._exchange = None
            for joinable in self._joinables:
                joinable.join_context = None

    def _join(self, exchange: ProgressExchange) -> None:
        exchange.join()
        if self._throws:
            if not all(p.is_joined for p in exchange.meet()):
                raise RuntimeError(
                    f"Rank {self._world.process_index} exhausted all inputs."
                )
        else:
            self._shadow(exchange)
        progress = exchange.progress
        self.last_joiner = find_last_joiner(progress)
        own, last = progress[self._world.process_index], progress[self.last_joiner]
        for hook in self._hooks:
            hook.post_hook(own.num_begun == last.num_begun)
        exchange.close()

    def _shadow(self, exchange: ProgressExchange) -> None:
        num_own = exchange.num_begun
        while True:
            task = next_task(exchange.num_begun, exchange.progress)
            if task.kind == "end":
                return
            if task.kind == "wait":
                exchange.hear(task.process)
                continue
            if exchange.num_begun - num_own == _SKEW_WARNING:
                warnings.warn(
                    f"Detected uneven input skew of greater than {_SKEW_WARNING}. This "
                    "means that process "
                    f"{self._world.process_index} has at least {_SKEW_WARNING} fewer "
                    "inputs than another. It shadows their iterations at full "
                    "cost; distribute the inputs more evenly.",
                    stacklevel=4,
                )
            exchange.shadow()
            for hook in self._hooks:
                hook.main_hook()
