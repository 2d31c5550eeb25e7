"""Divergence: at which step, and in which leaf, do two runs part?"""

import dataclasses
from typing import NamedTuple

from jdp.fingerprints.fingerprint import LeafOutline
from jdp.fingerprints.record import StepFingerprint


class LeafDifference(NamedTuple):
    """Leaf that differs, with what each run has; None: the run has no such leaf."""

    path: str
    a: str | None
    b: str | None


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Comparison of the records of two runs.

    Attributes:
      num_steps: number of steps that both have, and that were compared.
      last_same_step: the last step before the runs part; None: they differ in the
        first step that both have.
      step: the first step in which they differ; None: they are the same.
      differences: leaves that differ in that step, in the order of run a.
      num_leaves: number of leaves that were compared in the last step compared.
      not_compared: paths of leaves in a `jdp.PerReplica`, of runs with other numbers of
        replicas.
    """

    num_steps: int
    last_same_step: int | None
    step: int | None
    differences: list[LeafDifference]
    num_leaves: int
    not_compared: list[str]


def find_divergence(a: list[StepFingerprint], b: list[StepFingerprint]) -> Divergence:
    """Compares two runs, from their first common step to the first that differs.

    Raises:
      ValueError: they have no step in common.
    """
    others = {each.step: each for each in b}
    pairs = [(each, others[each.step]) for each in a if each.step in others]
    if not pairs:
        raise ValueError(
            "The runs have no step in common: the first has "
            f"{_describe_steps(a)}, the second {_describe_steps(b)}. Record both with "
            "the same period, `every`."
        )
    last_same = None
    skipped: list[str] = []
    num_leaves = 0
    for count, (one, other) in enumerate(pairs, 1):
        differences, skipped, num_leaves = _compare(one, other)
        if differences:
            return Divergence(
                count, last_same, one.step, differences, num_leaves, skipped
            )
        last_same = one.step
    return Divergence(len(pairs), last_same, None, [], num_leaves, skipped)


def _compare(
    a: StepFingerprint, b: StepFingerprint
) -> tuple[list[LeafDifference], list[str], int]:
    """Returns leaves that differ, paths that are not compared, and how many are."""
    ours, theirs = _by_path(a), _by_path(b)
    differences, skipped = [], []
    paths = list(dict.fromkeys([*ours, *theirs]))
    for path in paths:
        one, other = ours.get(path), theirs.get(path)
        if one == other:
            continue
        if one is None or other is None:
            specs = [None if x is None else x[0].spec for x in (one, other)]
            differences.append(LeafDifference(path, *specs))
        elif _have_other_rows(one[0], other[0]):
            skipped.append(path)
        elif one[0].spec != other[0].spec:
            differences.append(LeafDifference(path, one[0].spec, other[0].spec))
        else:
            differences.append(LeafDifference(path, one[1], other[1]))
    return differences, skipped, len(paths) - len(skipped)


def _by_path(each: StepFingerprint) -> dict[str, tuple[LeafOutline, str]]:
    pairs = zip(each.outlines, each.leaves, strict=True)
    return {outline.path: (outline, digest) for outline, digest in pairs}


def _have_other_rows(a: LeafOutline, b: LeafOutline) -> bool:
    """Returns whether leaves of replicas come from other numbers of replicas."""
    return a.is_own and b.is_own and a.spec != b.spec


def _describe_steps(steps: list[StepFingerprint]) -> str:
    if not steps:
        return "no step"
    first, last = steps[0].step, steps[-1].step
    return f"step {first}" if first == last else f"steps {first} to {last}"
