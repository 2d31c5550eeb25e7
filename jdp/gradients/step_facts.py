"""Step facts: one loss of a step, and one synchronisation of its gradients."""

import dataclasses
import functools
from collections.abc import Hashable

from jdp.backward.order import Timeline
from jdp.trees import buckets, tree_paths
from jdp.trees.buckets import BucketPlan
from jdp.trees.tree_paths import KeyPath


@dataclasses.dataclass(frozen=True)
class LossFacts:
    """Facts about one loss, read from its program; integers are leaf indices."""

    key_paths: tuple[KeyPath, ...]  # per leaf.
    timeline: Timeline
    never_used: tuple[int, ...]
    undecided: tuple[int, ...]
    synced_in_backward: tuple[int, ...]
    batch_norms: tuple[str, ...]  # name scopes of Flax's `BatchNorm`, "" for none.
    synced_batch_norms: tuple[str, ...]  # name scopes of jdp's `SyncBatchNorm`.
    exchanges: tuple[str, ...]  # other collectives that gradients go through.
    has_exchanges: bool  # whether gradients go through any collective.
    # Bytes that each `SyncBatchNorm` sums in one evaluation, and again for gradients.
    batch_norm_bytes: tuple[int, ...] = ()
    finds_unused: bool = False  # whether the caller asked which parameters are used.

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths of the leaves, for messages."""
        return tuple(tree_paths.format_paths(self.key_paths))

    @property
    def graph(self) -> tuple[Hashable, ...]:
        """The facts that are equal for two traces of one loss."""
        return self.paths, self.timeline.order(), self.never_used, self.undecided

    def check_is_local(self, name: str) -> None:
        """Raises ValueError if the backward pass reduces gradients of the loss.

        Args:
          name: the function or the option that needs the gradients of one replica.
        """
        if self.synced_in_backward:
            raise ValueError(
                f"`{name}` keeps gradients local, but the loss reduces the gradient of "
                f"`{self.paths[self.synced_in_backward[0]]}` in the backward pass "
                "(`jdp.sync_in_backward`). Use `jdp.value_and_grad`, or leave that out."
            )


@dataclasses.dataclass(frozen=True)
class Synchronization:
    """One reduction of gradients in a step, such as by `value_and_grad`."""

    plan: BucketPlan
    packing: str  # "flat" or "tuple".
    algorithm: str
    hook: str | None
    hook_bytes: int  # sent by the hook per replica, for all buckets.
    num_replicas: int
    riders: tuple[buckets.LeafSpec, ...]  # further arrays in the buckets.
    divide_by: str | None  # "weight", "active" or "world"; None without weights.
    loss: LossFacts | None  # None where only gradients were given.
    weight_bytes: int = 0  # size of the weights, in a bucket and before the gradients.
    # Whether gradients were multiplied by the weight after the backward pass.
    is_weighed_late: bool = False
    # Whether the backward pass did not even know which replicas have weight 0.
    is_weighed_blindly: bool = False
