"""`jdp fingerprint`: from which step on do two runs have other bits?"""

import json
import pathlib
from typing import Annotated, Any

import typer

from jdp.fingerprints import divergence, record
from jdp.fingerprints.divergence import Divergence, LeafDifference
from jdp.fingerprints.record import StepFingerprint

_MOST_SHOWN = 10  # leaves that differ.


def diff(
    a: Annotated[
        pathlib.Path,
        typer.Argument(metavar="A", help="The record of one run."),
    ],
    b: Annotated[
        pathlib.Path,
        typer.Argument(metavar="B", help="The record of another run."),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object of JSON.")
    ] = False,
) -> None:
    """Show the first step, and its leaves, in which two runs differ.

    A and B are files that `jdp.data_parallel(record_fingerprints=...)` wrote. The exit
    code is 0 if all steps that both have are the same, 1 if one differs, and 2 if a
    file is not such a record or there is no common step.
    """
    one, other = _read(a), _read(b)
    try:
        found = divergence.find_divergence(one, other)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps(_as_dict(found)))
    else:
        for line in _explain(found):
            typer.echo(line)
    raise typer.Exit(0 if found.step is None else 1)


def show(
    file: Annotated[
        pathlib.Path, typer.Argument(metavar="FILE", help="The record of a run.")
    ],
    step: Annotated[
        int | None, typer.Option(help="Show the leaves after this step.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON per step.")
    ] = False,
) -> None:
    """Show the steps of a record, or the leaves after one step.

    The exit code is 2 if the file is not a record or does not have the step.
    """
    steps = _read(file)
    if step is not None:
        steps = [each for each in steps if each.step == step]
        if not steps:
            raise typer.BadParameter(
                f"'{file}' does not have step {step}.", param_hint="--step"
            )
    for each in steps:
        if as_json:
            leaves = [
                {"path": outline.path, "type": outline.spec, "digest": digest}
                for outline, digest in zip(each.outlines, each.leaves, strict=True)
            ]
            line = {"step": each.step, "digest": each.digest}
            typer.echo(json.dumps(line | ({} if step is None else {"leaves": leaves})))
        else:
            typer.echo(f"step {each.step}  {each.digest}  {_count(each.leaves)}")
    if step is not None and not as_json:
        for outline, digest in zip(steps[0].outlines, steps[0].leaves, strict=True):
            typer.echo(f"  {digest}  {outline.path}  {outline.spec}")


def _read(path: pathlib.Path) -> list[StepFingerprint]:
    try:
        return record.read(path)
    except OSError as error:
        raise typer.BadParameter(
            f"{error.strerror}: '{error.filename}'. Name a file that "
            "`record_fingerprints=` wrote."
        ) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _as_dict(found: Divergence) -> dict[str, Any]:
    return {
        "same": found.step is None,
        "num_steps": found.num_steps,
        "last_same_step": found.last_same_step,
        "step": found.step,
        "leaves": [difference._asdict() for difference in found.differences],
        "num_leaves": found.num_leaves,
        "not_compared": found.not_compared,
    }


def _explain(found: Divergence) -> list[str]:
    lines = []
    if found.step is None:
        steps = "1 step" if found.num_steps == 1 else f"{found.num_steps:,} steps"
        lines.append(f"The runs are the same in {steps}, up to {found.last_same_step}.")
    else:
        before = (
            "the first that both have"
            if found.last_same_step is None
            else f"after step {found.last_same_step}, in which they are the same"
        )
        lines += [
            f"The runs differ in step {found.step}, {before}.",
            f"{len(found.differences):,} of {found.num_leaves:,} leaves differ:",
            *map(_explain_leaf, found.differences[:_MOST_SHOWN]),
        ]
        if len(found.differences) > _MOST_SHOWN:
            lines.append(f"  and {len(found.differences) - _MOST_SHOWN:,} more")
    if found.not_compared:
        lines.append(
            f"Not compared: {_count(found.not_compared)} in a `jdp.PerReplica`, since "
            f"the runs have other numbers of replicas, such as {found.not_compared[0]}"
        )
    return lines


def _explain_leaf(difference: LeafDifference) -> str:
    path, a, b = difference
    if a is None or b is None:
        return f"  {path}: only in {'B' if a is None else 'A'}, {a or b}"
    return f"  {path}: {a} in A, {b} in B"


def _count(leaves: list[str]) -> str:
    return "1 leaf" if len(leaves) == 1 else f"{len(leaves):,} leaves"
