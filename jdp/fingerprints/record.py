"""Record: which fingerprints did the states of a run have, step by step?

A record is a file of JSON lines. A run begins with a line about the leaves,

    {"format": 1, "step": 0, "leaves": [["['w']", "float32[4,2]", false], ...]}

where `step` is the number of steps done so far, and the last entry of a leaf tells
whether it is in a `jdp.PerReplica`. A line for a step has the digest of the tree, and
64 bits of the digest of each leaf, in the order of the leaves above it:

    {"step": 100, "digest": "6866...", "leaves": ["9f86d081884c7d65", ...]}
"""

import json
import operator
import os
import pathlib
from typing import Any, Literal

import jax
import msgspec

from jdp import types
from jdp.fingerprints import fingerprint
from jdp.fingerprints.fingerprint import LeafOutline
from jdp.replicas import wire
from jdp.replicas.mesh import World
from jdp.types import PyTree

_FORMAT = 1
_LEAF_DIGITS = 16  # of 32.


class FingerprintRecord:
    """File of the fingerprints that the state of a run has, every few steps.

    Pass it to `jdp.data_parallel(record_fingerprints=...)`. In a loop of your own, call
    `begin` with the first state, and `after_step` with the state after each step.

    A run adds to the file of an earlier run. A program that goes on from a checkpoint
    says with which step: `record.step = 1200`, before its first step. What the file has
    for later steps is then out of date, and is left out by `read`.

    Attributes:
      step: number of steps done so far; may be set, to the same on every process.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, every: int = 100, step: int = 0
    ):
        """Writes nothing yet.

        Args:
          path: the file, which process 0 writes. Its folder must exist.
          every: period: the steps whose number is a multiple of it are recorded.
          step: number of steps done so far.

        Raises:
          TypeError: an argument has the wrong type.
          ValueError: `every` is below 1, or `step` is negative.
        """
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"`path` must be the name of a file, got {path!r}.")
        self.path = pathlib.Path(path)
        self.every = types.as_count(every, "every", least=1)
        self.step = types.as_count(step, "step", least=0)
        self._outlines: list[LeafOutline] | None = None  # in the last line about them.

    def begin(self, state: PyTree, *, world: World | None = None) -> None:
        """Records the state before the first step of this run; later calls do nothing.

        Args:
          state: see `after_step`.
          world: see `after_step`.
        """
        if self._outlines is None:
            self.step = operator.index(self.step)
            self._note(state, world)

    def after_step(self, state: PyTree, *, world: World | None = None) -> None:
        """Counts one step, and records the state after it if it is due.

        Process 0 then waits for the step, and writes one line. The other processes do
        nothing, unless an array is cut among processes: then every process takes part.

        Args:
          state: see `jdp.fingerprint_state`.
          world: see there.

        Raises:
          OSError: the file cannot be written.
          TypeError: see `jdp.fingerprint_state`.
          RuntimeError: see there.
        """
        self.step = operator.index(self.step) + 1
        self._note(state, world)

    def _note(self, state: PyTree, world: World | None) -> None:
        is_first, is_due = self._outlines is None, self.step % self.every == 0
        if not (is_first or is_due):
            return
        outlines, leaves = fingerprint.flatten(state)
        is_main = jax.process_index() == 0 if world is None else world.is_main_process
        is_other = outlines != self._outlines
        self._outlines = outlines
        takes_part = is_main or any(map(fingerprint.is_cut_among_processes, leaves))
        lines: list[dict[str, Any]] = []
        if is_other:
            listed = [list(outline) for outline in outlines]
            lines.append({"format": _FORMAT, "step": self.step, "leaves": listed})
        if is_due and takes_part:
            digests = fingerprint.leaf_digests(outlines, leaves, world=world)
            found = fingerprint.combine(outlines, digests)
            short = [digest[:_LEAF_DIGITS] for digest in found.leaves.values()]
            lines.append({"step": self.step, "digest": found.digest, "leaves": short})
        if is_main and lines:
            _append(self.path, lines)


RecordTo = FingerprintRecord | str | os.PathLike[str] | None


def as_record(value: RecordTo) -> FingerprintRecord | None:
    """Returns the record that the option `record_fingerprints` names.

    Raises:
      TypeError: it is neither a record nor the name of a file.
    """
    if value is None or isinstance(value, FingerprintRecord):
        return value
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            "`record_fingerprints` must be the name of a file or a "
            f"`jdp.FingerprintRecord`, got {value!r}."
        )
    return FingerprintRecord(value)


class StepFingerprint(msgspec.Struct, frozen=True):
    """Fingerprint of the state after one step, as a record has it.

    Attributes:
      step: number of steps done.
      digest: digest of the whole state, 32 hexadecimal digits.
      outlines: the leaves.
      leaves: the first 16 hexadecimal digits of the digest of each leaf.
    """

    step: int
    digest: str
    outlines: list[LeafOutline]
    leaves: list[str]


def read(path: str | os.PathLike[str]) -> list[StepFingerprint]:
    """Reads a record.

    Where a run went on from a checkpoint, the fingerprints that earlier runs made of
    later steps are left out. So is a last line that was not written to its end.

    Returns:
      The fingerprints, by ascending step.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not such a record. The message names the line.
    """
    data = pathlib.Path(path).read_bytes()
    *lines, _ = data.split(b"\n")
    found: dict[int, StepFingerprint] = {}
    outlines: list[LeafOutline] | None = None
    for number, line in enumerate(lines, 1):
        try:
            head = wire.decode_with(_decode_head, line)
            if head.format is not None:
                outlines = wire.decode_with(_decode_outlines, line).leaves
                found = {step: x for step, x in found.items() if step < head.step}
                continue
            each = wire.decode_with(_decode_step, line)
            if outlines is None or len(outlines) != len(each.leaves):
                raise ValueError("it has other leaves than the line about leaves above")
            found[each.step] = StepFingerprint(
                each.step, each.digest, outlines, each.leaves
            )
        except ValueError as error:
            raise ValueError(
                f"'{path}' is not a record of fingerprints: line {number}: {error}."
            ) from None
    if outlines is None:
        raise ValueError(f"'{path}' is not a record of fingerprints: it has no line.")
    return [found[step] for step in sorted(found)]


class _Head(msgspec.Struct, frozen=True):
    step: int
    format: Literal[1] | None = None  # in a line about leaves.


class _OutlinesLine(msgspec.Struct, frozen=True):
    leaves: list[LeafOutline]


class _StepLine(msgspec.Struct, frozen=True):
    step: int
    digest: str
    leaves: list[str]


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_outlines = msgspec.json.Decoder(_OutlinesLine).decode
_decode_step = msgspec.json.Decoder(_StepLine).decode


def _append(path: pathlib.Path, lines: list[dict[str, Any]]) -> None:
    """Adds lines to a file, at once, so that a killed run keeps them."""
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) not in (b"", b"\n"):  # An earlier run was killed in a line.
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(data)
