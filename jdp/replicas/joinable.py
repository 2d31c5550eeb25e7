"""Joinables: what does a process do for the others after its input has ended?"""

import abc
import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jdp.replicas.mesh import World
from jdp.types import Device


class JoinContext(Protocol):
    """Interface through which a `Joinable` sees its `jdp.Join`."""

    is_enabled: bool  # False: all processes have the same number of iterations.
    last_joiner: int | None  # index of a process; known once all have joined.

    def notify(self, joinable: "Joinable") -> None:
        """Tells the `Join` that an iteration begins; see `notify_join_context`."""
        ...


class JoinHook:
    """Actions in place of an iteration, and after the last iteration of all processes.

    Both do nothing unless they are overridden.
    """

    def main_hook(self) -> None:
        """Takes part in the communication of one iteration of the other processes.

        Called once per iteration, as long as some process still has input.
        """

    def post_hook(self, is_last_joiner: bool) -> None:
        """Ends the loop on all processes; called once, when all have joined.

        Args:
          is_last_joiner: whether no process had more iterations than this one, so that
            its state is the newest.
        """


class Joinable(abc.ABC):
    """Object that communicates in each iteration, for use in a `jdp.Join`.

    It must call `jdp.Join.notify_join_context(self)` in each iteration, before it
    communicates.
    """

    join_context: JoinContext | None = None  # set by the surrounding `jdp.Join`.
    # Names of the options that `join_hook` takes. None: the names in its signature, or
    # any name if it has `**kwargs`.
    join_options: Collection[str] | None = None

    @abc.abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook; `kwargs` are the options of the `Join` that it takes."""

    @property
    @abc.abstractmethod
    def join_world(self) -> World:
        """World of the processes that the joinable communicates with."""

    @property
    def join_device(self) -> Device:
        """First device of this process in `join_world`."""
        return self.join_world.local_devices[0]


def as_list(joinables: Iterable[Joinable]) -> list[Joinable]:
    """Returns the joinables of a `jdp.Join`.

    Raises:
      ValueError: the list is empty.
      TypeError: `joinables` is not a list, or an element is not a joinable.
    """
    if isinstance(joinables, Joinable) or not isinstance(joinables, Iterable):
        raise TypeError(
            "`joinables` must be a list, such as `jdp.Join([step])`, got "
            f"{type(joinables).__name__}."
        )
    found = list(joinables)
    if not found:
        raise ValueError("`joinables` is empty; a `Join` requires at least one.")
    for i, joinable in enumerate(found):
        if not isinstance(joinable, Joinable):
            raise TypeError(
                f"`joinables[{i}]` must be a `jdp.Joinable`, such as a step of "
                f"`jdp.data_parallel`, got {type(joinable).__name__}."
            )
    return found


def common_world(joinables: Sequence[Joinable]) -> World:
    """Returns the world of all joinables.

    Raises:
      ValueError: they belong to several worlds.
    """
    worlds = [joinable.join_world for joinable in joinables]
    for world in worlds[1:]:
        if world is not worlds[0] and world != worlds[0]:
            raise ValueError(
                "`joinables` belong to several worlds; all joinables of one `Join` "
                "must communicate among the same processes."
            )
    return worlds[0]


def make_hooks(
    joinables: Sequence[Joinable], options: Mapping[str, Any]
) -> list[JoinHook]:
    """Makes the hook of each joinable, with the options that it takes.

    Raises:
      TypeError: an option is not taken by any joinable.
    """
    taken = [_options_of(joinable) for joinable in joinables]
    if None not in taken:
        known = {name for names in taken for name in names or ()}
        for name in options:
            if name not in known:
                raise TypeError(_explain_unknown(name, options[name], known))
    return [
        joinable.join_hook(
            **{k: v for k, v in options.items() if names is None or k in names}
        )
        for joinable, names in zip(joinables, taken, strict=True)
    ]


def _options_of(joinable: Joinable) -> Collection[str] | None:
    """Returns the names of the options that a joinable takes; None: any."""
    if joinable.join_options is not None:
        return joinable.join_options
    parameters = inspect.signature(joinable.join_hook).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name for p in parameters if p.kind in by_name}


def _explain_unknown(name: str, value: Any, known: set[str]) -> str:
    """Explains that an option is unknown, and suggests another one."""
    names = sorted({*known, "enable", "throw_on_early_termination"})
    text = f"`jdp.Join` has no option `{name}`, and no joinable in it takes one."
    if name == "divide_by_initial_world_size" and "divide_by" in known:
        meant = "world" if value else "active"
        return (
            f"{text} The equivalent of torch's option with the value {value!r} is "
            f"`divide_by={meant!r}`."
        )
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"{text} Did you mean `{near[0]}`?"
    return f"{text} The options are {', '.join(f'`{x}`' for x in names)}."
