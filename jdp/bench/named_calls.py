"""Named calls: the all-reduces by name that each system makes in `jdp bench eager`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jdp.bench import channel


def make_runners(
    submit: Callable[[Any, str], Any], wait: Callable[[Any], Any], elements: Sequence
) -> tuple[channel.RunSteps, channel.RunSteps]:
    """Returns what submits all elements and waits: under known names, and new ones.

    Args:
      submit: starts the all-reduce of an element under a name, and returns a handle.
      wait: waits for a handle.
      elements: arrays, one per name.
    """
    known_names = [f"element {i}" for i in range(len(elements))]
    calls = itertools.count()

    def reduce_all(names: Sequence[str]) -> None:
        handles = [submit(x, name) for x, name in zip(elements, names, strict=True)]
        for handle in handles:
            wait(handle)

    def reduce_new() -> None:
        call = next(calls)
        reduce_all([f"new element {call}.{i}" for i in range(len(elements))])

    return repeating(lambda: reduce_all(known_names)), repeating(reduce_new)


def repeating(once: Callable[[], Any]) -> channel.RunSteps:
    """Returns what times calls of `once`, which has been called twice before."""
    once()  # compiles, and the processes agree on all names.
    once()
    return lambda num_steps: channel.time_steps(once, num_steps)
