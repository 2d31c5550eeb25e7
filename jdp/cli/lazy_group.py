"""Lazy group: commands of the command line that are imported when they are used.

To import all of them takes more than a second. A group shows their names and its own
texts about them, so that help, errors and completions need not import any.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import typer
import typer.core
import typer.main


class Command(NamedTuple):
    """Command: a function of a module."""

    place: str  # "module:function".
    help: str  # the first line of its docstring.
    context_settings: Mapping[str, Any] = {}

    def load(self, name: str) -> Any:
        """Imports the command, and returns it as typer knows it."""
        module, function = self.place.split(":")
        app = typer.Typer(
            add_completion=False,
            # Plain messages: boxes break them in the middle of paths and commands.
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
        )
        app.command(name, context_settings=dict(self.context_settings))(
            getattr(importlib.import_module(module), function)
        )
        return typer.main.get_command(app)


class Group(NamedTuple):
    """Group of commands, by name."""

    help: str
    entries: "Mapping[str, Command | Group]"

    def load(self, name: str) -> Any:
        """Returns the group as typer knows it; imports nothing."""
        app = typer.Typer(
            name=name,
            cls=make_class(self.entries),
            help=self.help,
            no_args_is_help=True,
            rich_markup_mode=None,
        )
        return typer.main.get_group(app)


class LazyGroup(typer.core.TyperGroup):
    """Group of typer whose commands are loaded when they are looked up."""

    entries: ClassVar[Mapping[str, Command | Group]] = {}

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands: Any = _Loaded(self.entries)

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of the commands, in the order of the entries."""
        return list(self.entries)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the names and texts of all commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, e.help) for name, e in self.entries.items()])


class _Loaded(Mapping[str, Any]):
    """Commands by name, each loaded when it is first looked up."""

    def __init__(self, entries: Mapping[str, Command | Group]):
        self._entries = entries
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            self._found[name] = self._entries[name].load(name)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def make_class(entries: Mapping[str, Command | Group]) -> type[LazyGroup]:
    """Returns the class of a group that has these commands."""
    return type("CommandGroup", (LazyGroup,), {"entries": entries})


def preload(entries: Mapping[str, Command | Group], words: list[str]) -> None:
    """Imports the module of the command that `words` begin with, if there is one."""
    entry = entries.get(words[0]) if words else None
    if isinstance(entry, Group):
        preload(entry.entries, words[1:])
    elif entry is not None:
        importlib.import_module(entry.place.split(":")[0])
