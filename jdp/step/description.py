"""Description: what does a step send, and when is each bucket ready?"""

import dataclasses
import io
import json
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from jdp.gradients.step_facts import LossFacts, Synchronization
from jdp.gradients.step_trace import StepTrace
from jdp.replicas.mesh import World
from jdp.step.call_arguments import NotGiven
from jdp.trees.buckets import remaining_buckets
from jdp.types import PyTree

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


@runtime_checkable
class TraceableStep(Protocol):
    """Step of `jdp.data_parallel`, or of `jdp.flax_nnx.data_parallel`."""

    name: str

    @property
    def world(self) -> World:
        """Replicas that the step runs on."""
        ...

    def trace(self, /, *arguments: PyTree, **named: PyTree) -> StepTrace:
        """Traces the step, to see what it synchronises."""
        ...


_DIVISORS = {
    "weight": "the total weight, which is sent in a bucket",
    "active": "the number of replicas with data, which is sent in a bucket",
    "world": "the number of all replicas",
}


@dataclasses.dataclass(frozen=True)
class LeafDescription:
    """One gradient in a bucket."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class BucketDescription:
    """One bucket, and when in the backward pass it is ready."""

    num_bytes: int
    ready_after: float | None  # share of the backward pass; None if unknown.
    leaves: tuple[LeafDescription, ...]  # in packing order.


@dataclasses.dataclass(frozen=True)
class SynchronizationDescription:
    """Traffic of one `value_and_grad` or similar function in a step."""

    buckets: tuple[BucketDescription, ...]  # in the order sent.
    riders: tuple[str, ...]  # values sent in the buckets besides gradients.
    divide_by: str | None  # how replicas are weighted; None: equal weights.
    weight_bytes: int  # size of the weights that are sent; 0 without weights.
    # Bytes of each collective of `SyncBatchNorm`: forward, then the same for gradients.
    batch_norm_bytes: tuple[int, ...]
    synced_in_backward: tuple[LeafDescription, ...]  # by `jdp.sync_in_backward`.
    never_used: tuple[str, ...]  # paths that cannot receive a gradient; not sent.
    used_at_times: tuple[str, ...]  # paths that control flow decides about.
    packing: str  # "flat" or "tuple".
    algorithm: str  # "psum", or the name of the `all_reduce`.
    hook: str | None  # the name of the communication hook.
    wire_bytes: int  # sent by one replica per step; see `Description.wire_bytes`.


@dataclasses.dataclass(frozen=True)
class Description:
    """Traffic of a step; `str` makes a table of it."""

    name: str
    num_replicas: int
    synchronizations: tuple[SynchronizationDescription, ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes that one replica sends per step.

        2 (n - 1) / n times the bytes of the buckets, the cost of a bandwidth-optimal
        all-reduce such as the ring (Patarasuk and Yuan, 2009). With a hook, the bytes
        that the hook passes on are counted. The weight of a replica counts, and so do
        the collectives of `SyncBatchNorm`, as many as one evaluation of the loss and
        its gradient has outside of loops.
        """
        return sum(made.wire_bytes for made in self.synchronizations)

    def to_json(self) -> str:
        """Returns the description as JSON; keys are the names of the fields."""
        fields = {**dataclasses.asdict(self), "wire_bytes": self.wire_bytes}
        return json.dumps(fields, indent=1)

    def __str__(self) -> str:
        """Returns the tables as text, 120 columns wide."""
        # Not at the top: importing jdp stays free of rich.
        from rich.console import Console

        # To a file and as in a terminal: in a notebook rich would display it at once.
        text = io.StringIO()
        console = Console(
            file=text, width=120, no_color=True, highlight=False, force_jupyter=False
        )
        console.print(self)
        return text.getvalue()

    def __rich__(self) -> "Group":
        """Form for `rich.print`: a table for each synchronisation."""
        from rich.console import Group

        plural = "" if self.num_replicas == 1 else "s"
        title = f"{self.name} on {self.num_replicas} replica{plural}"
        if not self.synchronizations:
            return Group(f"{title}: synchronises nothing.")
        return Group(*[_table(title, made) for made in self.synchronizations])


def describe(
    step: TraceableStep,
    state: PyTree = NotGiven,
    /,
    *batches: PyTree,
    **named: PyTree,
) -> Description:
    """Describes what a step of `jdp.data_parallel` sends.

    The step is traced, not run, and nothing is sent. One process may call it alone.

    Args:
      step: the result of `jdp.data_parallel` or `jdp.flax_nnx.data_parallel`.
      state: a state as the step takes it, or `jax.ShapeDtypeStruct`s; for a step of nnx
        objects, its first argument.
      *batches: batches as the step takes them, or `jax.ShapeDtypeStruct`s with the
        shapes of this process' samples.
      **named: arguments by name.

    Returns:
      The buckets in the order sent, each with its parameters, its bytes, and the share
      of the backward pass after which it is ready; the parameters that are never used
      or only used at times; and the bytes on the wire. `str` makes a table of it,
      `to_json` makes JSON.

    Raises:
      TypeError: `step` is not a step of `jdp.data_parallel`, or a leaf is not an array.
    """
    if not isinstance(step, TraceableStep):
        raise TypeError(
            "`step` must be what `jdp.data_parallel` returned, got "
            f"{type(step).__name__}. For a loss function, use `jdp plan`."
        )
    given = () if state is NotGiven else (state,)
    found = step.trace(*given, *batches, **named)
    return make_description(step.name, step.world.num_replicas, found.synchronizations)


def make_description(
    name: str, num_replicas: int, made: list[Synchronization]
) -> Description:
    """Describes the synchronisations that a trace recorded."""
    return Description(name, num_replicas, tuple(map(_describe, made)))


def wire_bytes(num_bytes: int, num_replicas: int) -> int:
    """Returns 2 (n - 1) / n times `num_bytes`, which one of n replicas sends."""
    return round(2 * (num_replicas - 1) / num_replicas * num_bytes)


def _describe(made: Synchronization) -> SynchronizationDescription:
    plan, loss = made.plan, made.loss
    paths = plan.leaf_paths()
    synced = loss.synced_in_backward if loss else ()
    never_used = loss.never_used if loss else ()

    def leaf(i: int) -> LeafDescription:
        spec = plan.leaves[i]
        return LeafDescription(paths[i], spec.dtype.name, spec.shape, spec.num_bytes)

    buckets = tuple(
        BucketDescription(
            sum(plan.leaves[i].num_bytes for i in bucket),
            _ready_after(loss, bucket),
            tuple(map(leaf, bucket)),
        )
        for bucket in remaining_buckets(plan, {*synced, *never_used})
    )
    sent = [] if made.hook else [bucket.num_bytes for bucket in buckets]
    sent += [spec.num_bytes for spec in made.riders]
    sent += [plan.leaves[i].num_bytes for i in synced]
    of_norms = 2 * loss.batch_norm_bytes if loss and made.num_replicas > 1 else ()
    sent += [made.weight_bytes, *of_norms]
    return SynchronizationDescription(
        buckets=buckets,
        riders=tuple(map(str, made.riders)),
        divide_by=made.divide_by,
        weight_bytes=made.weight_bytes,
        batch_norm_bytes=of_norms,
        synced_in_backward=tuple(map(leaf, synced)),
        never_used=tuple(paths[i] for i in never_used),
        used_at_times=tuple(paths[i] for i in loss.undecided) if loss else (),
        packing=made.packing,
        algorithm=made.algorithm,
        hook=made.hook,
        wire_bytes=wire_bytes(sum(sent), made.num_replicas) + made.hook_bytes,
    )


def _ready_after(loss: LossFacts | None, bucket: tuple[int, ...]) -> float | None:
    return max(loss.timeline.ready_after[i] for i in bucket) if loss else None


def _table(title: str, made: SynchronizationDescription) -> "Table":
    from rich.table import Table
    from rich.text import Text  # brackets in paths are not markup.

    table = Table(title=title, caption=Text(_caption(made)), caption_justify="left")
    for name in ("bucket", "bytes", "ready after"):
        table.add_column(name, justify="right")
    table.add_column("gradient")
    table.add_column("path", overflow="fold")

    def add(leaf: LeafDescription, *cells: str) -> None:
        shape = ",".join(map(str, leaf.shape))
        note = "  (used at times)" if leaf.path in made.used_at_times else ""
        row = (*cells, f"{leaf.dtype}[{shape}]", f"{leaf.path}{note}")
        table.add_row(*map(Text, row))

    for number, bucket in enumerate(made.buckets):
        ready = "" if bucket.ready_after is None else f"{bucket.ready_after:.0%}"
        for position, leaf in enumerate(bucket.leaves):
            cells = (str(number), f"{bucket.num_bytes:,}", ready)
            add(leaf, *(cells if position == 0 else ("", "", "")))
        table.add_section()
    for leaf in made.synced_in_backward:
        add(leaf, "", f"{leaf.num_bytes:,}", "in backward")
    return table


def _caption(made: SynchronizationDescription) -> str:
    noun = "bucket" if len(made.buckets) == 1 else "buckets"
    lines = [
        f"{len(made.buckets)} {noun}, packing {made.packing}, algorithm "
        f"{made.algorithm}, hook {made.hook or 'none'}; one replica sends "
        f"{made.wire_bytes:,} bytes per step."
    ]
    if made.riders:
        lines.append(f"Besides gradients: {', '.join(made.riders)}.")
    if made.batch_norm_bytes:
        lines.append(
            f"Batch norm: {len(made.batch_norm_bytes)} collectives of "
            f"{sum(made.batch_norm_bytes):,} bytes in all."
        )
    if made.divide_by:
        lines.append(
            "Replicas without data have weight 0; the sum is divided by "
            f"{_DIVISORS[made.divide_by]}."
        )
    if made.never_used:
        lines.append(f"Never used, and not sent: {', '.join(made.never_used)}.")
    return "\n".join(lines)
