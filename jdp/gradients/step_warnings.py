"""Step warnings: facts of a step that point to a mistake of the user."""

import logging
import warnings
from collections.abc import Sequence

from jdp.gradients.step_facts import LossFacts, Synchronization

_logger = logging.getLogger("jdp")


def warn_of_loss(facts: LossFacts) -> None:
    """Warns of parameters that a step leaves without a gradient, always or at times."""
    _warn_of_never_used(facts)
    _warn_of_undecided(facts)


def warn_of_weights(
    made: Sequence[Synchronization], losses: Sequence[LossFacts]
) -> None:
    """Warns of losses that do not go together with the weights of their gradients."""
    _warn_of_batch_norms(losses)
    _warn_of_late_weights(made, losses)


def _warn_of_never_used(facts: LossFacts) -> None:
    """Warns of parameters that can never receive a gradient."""
    if not facts.never_used:
        return
    paths = [facts.paths[i] for i in facts.never_used]
    warnings.warn(
        f"{len(paths)} of {len(facts.paths)} parameters can never receive a gradient: "
        f"{_listed(paths)}. The loss does not depend on them, or `stop_gradient` is "
        "between. If that is meant, keep them out of the parameters.",
        stacklevel=2,
    )


def _warn_of_undecided(facts: LossFacts) -> None:
    """Warns of parameters that control flow may leave out, without `find_unused`."""
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


def _warn_of_batch_norms(losses: Sequence[LossFacts]) -> None:
    """Warns of Flax's `BatchNorm`, which does not know the weights."""
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


def _warn_of_late_weights(
    made: Sequence[Synchronization], losses: Sequence[LossFacts]
) -> None:
    """Warns of weights that are applied after a backward pass with collectives."""
    exchanges = list(dict.fromkeys(e for facts in losses for e in facts.exchanges))
    if exchanges and any(x.is_weighed_late or x.is_weighed_blindly for x in made):
        warnings.warn(
            "Gradients are weighted after the backward pass of a loss with a "
            f"collective in it: {', '.join(exchanges[:3])}. Through it the gradient of "
            "each replica comes from the losses of all, which counted the same there, "
            "those without data too. Use `jdp.value_and_grad(weight=...)`, which "
            "weights the losses, in place of `jdp.local_gradients` and `weight=` "
            "afterwards, without `jdp.sync_in_backward`.",
            stacklevel=2,
        )
    scopes = sorted({scope for facts in losses for scope in facts.synced_batch_norms})
    if not scopes or not any(each.is_weighed_late for each in made):
        return
    warnings.warn(
        "Gradients are weighted after the backward pass of a loss with synchronised "
        "batch norm, whose statistics tie the gradient of each replica to the losses "
        "of all. That is right only where replicas with data have the same weight; "
        "use `jdp.value_and_grad(weight=...)`, which weights the losses, without "
        "`jdp.sync_in_backward`.",
        stacklevel=2,
    )


def compare_graphs(
    name: str,
    old: Sequence[LossFacts],
    new: Sequence[LossFacts],
    *,
    is_main: bool,
    is_fixed: bool,
) -> None:
    """Warns if the losses of two traces of a step differ.

    Args:
      name: name of the step.
      old: the distinct losses of the earlier trace.
      new: the distinct losses of this trace.
      is_main: whether this process warns.
      is_fixed: whether a difference is an error.

    Raises:
      ValueError: they differ, and `is_fixed`.
    """
    difference = graph_difference(old, new)
    if difference is None:
        return
    text = f"The step `{name}` was traced again, and {difference}."
    if is_fixed:
        raise ValueError(
            f"{text} With `static_graph=True` every trace must find the same; leave it "
            "out if the difference is intended."
        )
    if is_main:
        _logger.warning(text)


def graph_difference(old: Sequence[LossFacts], new: Sequence[LossFacts]) -> str | None:
    """Describes how the losses of two traces of one step differ; None if equal.

    Compares the paths of the parameters, which of them are used, always or at times,
    and the order of their gradients.

    Args:
      old: the distinct losses of the earlier trace.
      new: the distinct losses of this trace.
    """
    for a, b in zip(old, new, strict=False):
        if a.graph != b.graph:
            return _difference(a, b)
    if len(old) != len(new):
        return f"it has {len(new)} different losses, and had {len(old)}"
    return None


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
            f"the gradient of `{b.paths[is_now]}` is now finished where the "
            f"gradient of `{a.paths[was]}` was"
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
