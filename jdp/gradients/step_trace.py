"""Recording: what was synchronised, and why so, while a step was traced."""

import contextlib
import contextvars
import dataclasses
import warnings
from collections.abc import Hashable, Iterator, Sequence

from jdp.backward.order import Timeline
from jdp.trees import buckets
from jdp.trees.buckets import BucketPlan


@dataclasses.dataclass(frozen=True)
class LossFacts:
    """Facts from the program of a loss, by leaf index of the parameters."""

    paths: tuple[str, ...]
    timeline: Timeline
    never_used: tuple[int, ...]
    undecided: tuple[int, ...]
    synced_in_backward: tuple[int, ...]
    batch_norms: tuple[str, ...]  # scopes of Flax's own; "" where there is none.
    synced_batch_norms: tuple[str, ...]  # the same of those of jdp.
    exchanges: tuple[str, ...]  # other collectives that gradients go through.
    has_exchanges: bool  # whether there are collectives of either kind.
    finds_unused: bool = False  # whether the caller asked what was used.


@dataclasses.dataclass(frozen=True)
class Synchronization:
    """Synchronisation by one call of `value_and_grad`, or its like, in a step."""

    plan: BucketPlan
    packing: str  # "flat" or "tuple".
    algorithm: str
    hook: str | None
    hook_bytes: int  # that it sends of a replica, for all buckets.
    num_replicas: int
    riders: tuple[buckets.LeafSpec, ...]  # what rides in the buckets.
    divide_by: str | None  # "weight", "active" or "world"; None without weights.
    loss: LossFacts | None  # None where only gradients were given.
    is_weighed_late: bool = False  # by a replica's number of samples, after backward.
    # Whether weights were given that the backward pass did not know at all, not even
    # of which replicas they are zero.
    is_weighed_blindly: bool = False


@dataclasses.dataclass
class Recording:
    """Traced synchronisations, in the order of the program."""

    losses: list[LossFacts] = dataclasses.field(default_factory=list)
    synchronizations: list[Synchronization] = dataclasses.field(default_factory=list)

    def distinct_losses(self) -> list[LossFacts]:
        """The losses, once each; that of micro-batches of two sizes is traced twice."""
        found: dict[Hashable, LossFacts] = {}
        for facts in self.losses:
            # What was used is known of a loss if one of its calls asks for it.
            if facts.finds_unused or _graph(facts) not in found:
                found[_graph(facts)] = facts
        return list(found.values())


_current: contextvars.ContextVar[Recording | None] = contextvars.ContextVar(
    "recording", default=None
)


@contextlib.contextmanager
def collect() -> Iterator[Recording]:
    """While tracing: collects what losses tell and what is synchronised."""
    found = Recording()
    token = _current.set(found)
    try:
        yield found
    finally:
        _current.reset(token)


def add_loss(facts: LossFacts) -> None:
    """Notes a loss that was traced; warns by itself where nothing collects."""
    found = _current.get()
    if found is not None:
        found.losses.append(facts)
    else:
        warn_of_never_used(facts)
        warn_of_undecided(facts)


def add_synchronization(made: Synchronization) -> None:
    """Notes what is synchronised."""
    found = _current.get()
    if found is not None:
        found.synchronizations.append(made)
    elif made.divide_by is not None and made.loss is not None:
        warn_of_batch_norms([made.loss])
        warn_of_late_weights([made], [made.loss])


def has_synchronized() -> bool:
    """Whether what is being traced has synchronised gradients."""
    found = _current.get()
    return found is not None and bool(found.synchronizations)


def warn_of(found: Recording) -> None:
    """Warns of what the trace of a step has found; once per loss."""
    for facts in found.distinct_losses():
        warn_of_never_used(facts)
        warn_of_undecided(facts)
    if any(made.divide_by for made in found.synchronizations):
        warn_of_batch_norms(found.losses)
        warn_of_late_weights(found.synchronizations, found.losses)


def warn_of_never_used(facts: LossFacts) -> None:
    """Warns, by path, of parameters that can never receive a gradient."""
    if not facts.never_used:
        return
    paths = [facts.paths[i] for i in facts.never_used]
    warnings.warn(
        f"{len(paths)} of {len(facts.paths)} parameters can never receive a gradient: "
        f"{_listed(paths)}. The loss does not depend on them, or `stop_gradient` is "
        "between. If that is meant, keep them out of the parameters.",
        stacklevel=2,
    )


def warn_of_undecided(facts: LossFacts) -> None:
    """Warns, by path, of parameters that control flow may leave out, unasked."""
    if facts.finds_unused or not facts.undecided:
        return
    paths = [facts.paths[i] for i in facts.undecided]
    warnings.warn(
        f"{len(paths)} of {len(facts.paths)} parameters may be left out of a step by "
        f"control flow: {_listed(paths)}. Their gradient is zero then, and an "
        "optimizer with momentum or weight decay moves them all the same. Pass "
        "`find_unused=True`, and wrap the optimizer in `jdp.skip_unused`, or ignore "
        "this warning if that is meant.",
        stacklevel=2,
    )


def warn_of_batch_norms(losses: Sequence[LossFacts]) -> None:
    """Warns of what averages over batches without regard to weights."""
    scopes = sorted({scope for facts in losses for scope in facts.batch_norms})
    if not scopes:
        return
    named = [scope for scope in scopes if scope]
    where = f" ({_listed(named)})" if named else ""
    warnings.warn(
        f"A weighted step runs Flax's `BatchNorm`{where}. Its statistics count padding "
        "as data, unless it is called with a `mask`, and the average over replicas "
        "counts each replica the same, with data or without. Results will depend on "
        "how the samples are distributed; use `SyncBatchNorm` of `jdp.flax_linen` or "
        "`jdp.flax_nnx`, with the weights of the samples, or `convert_batch_norm`.",
        stacklevel=2,
    )


def warn_of_late_weights(
    made: Sequence[Synchronization], losses: Sequence[LossFacts]
) -> None:
    """Warns of weights that come after gradients through values of all replicas."""
    exchanges = list(dict.fromkeys(e for facts in losses for e in facts.exchanges))
    if exchanges and any(x.is_weighed_late or x.is_weighed_blindly for x in made):
        warnings.warn(
            "Gradients are weighed after the backward pass of a loss with a collective "
            f"in it: {', '.join(exchanges[:3])}. Through it the gradient of each "
            "replica comes from the losses of all, which counted the same there, those "
            "without data too. Use `jdp.value_and_grad(weight=...)`, which weighs the "
            "losses, in place of `jdp.local_gradients` and `weight=` afterwards, "
            "without `jdp.sync_in_backward`.",
            stacklevel=2,
        )
    scopes = sorted({scope for facts in losses for scope in facts.synced_batch_norms})
    if not scopes or not any(each.is_weighed_late for each in made):
        return
    warnings.warn(
        "Gradients are weighed after the backward pass of a loss with synchronised "
        "batch norm, whose statistics tie the gradient of each replica to the losses "
        "of all. That is right only where replicas with data have the same weight; "
        "use `jdp.value_and_grad(weight=...)`, which weighs the losses, without "
        "`jdp.sync_in_backward`.",
        stacklevel=2,
    )


def graph_difference(before: Recording, now: Recording) -> str | None:
    """Says how the losses of two traces of one step differ; None if they do not.

    Compared are the paths of the parameters, which of them are used, always or at
    times, and the order of their gradients.
    """
    old, new = before.distinct_losses(), now.distinct_losses()
    for a, b in zip(old, new, strict=False):
        if _graph(a) != _graph(b):
            return _difference(a, b)
    if len(old) != len(new):
        return f"it has {len(new)} different losses, and had {len(old)}"
    return None


def _graph(facts: LossFacts) -> tuple[Hashable, ...]:
    order = facts.timeline.order()
    return facts.paths, order, facts.never_used, facts.undecided


def _difference(a: LossFacts, b: LossFacts) -> str:
    if a.paths != b.paths:
        lost = [path for path in a.paths if path not in b.paths]
        gained = [path for path in b.paths if path not in a.paths]
        parts = [f"{_listed(lost)} were parameters and are not"] * bool(lost)
        parts += [f"{_listed(gained)} are parameters and were not"] * bool(gained)
        return "; ".join(parts) or "the parameters come in another order"
    parts = []
    for path in a.paths:
        was, is_now = _usage(a, path), _usage(b, path)
        if was != is_now:
            parts.append(f"`{path}` was {was} used and is now {is_now} used")
    if not parts:
        pairs = zip(a.timeline.order(), b.timeline.order(), strict=True)
        was, is_now = next((i, k) for i, k in pairs if i != k)
        parts.append(
            f"the gradient of `{b.paths[is_now]}` is now finished where that of "
            f"`{a.paths[was]}` was"
        )
    return "; ".join(parts[:10]) + ("; ..." if len(parts) > 10 else "")


def _usage(facts: LossFacts, path: str) -> str:
    index = facts.paths.index(path)
    if index in facts.never_used:
        return "never"
    return "at times" if index in facts.undecided else "always"


def _listed(paths: Sequence[str]) -> str:
    shown = ", ".join(f"`{path}`" for path in paths[:10])
    return shown + (", ..." if len(paths) > 10 else "")
