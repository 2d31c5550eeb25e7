"""Bucket names: under which names do profilers and dumps of XLA show the buckets?"""

from collections.abc import Sequence

import jax

from jdp.trees.buckets import BucketPlan
from jdp.trees.tree_paths import KeyPath

# Riders without gradients of their dtype, and what `jdp.average` averages.
VALUES = "jdp/values"


def scope_names(plan: BucketPlan, sent: Sequence[Sequence[int]]) -> list[str]:
    """Returns a name scope per bucket, such as "jdp/bucket_3/params.block_2.w".

    Args:
      plan: the plan.
      sent: leaf indices per bucket, in the order sent, as `jdp.describe` counts them.

    Returns:
      The number of the bucket and the path of its first leaf.
    """
    size = len(plan.leaves)
    paths: list[KeyPath] = [()] * size
    try:
        tree = jax.tree.unflatten(plan.treedef, range(size))
        found = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        paths = found if len(found) == size else paths
    except Exception:  # A class of the tree accepts only arrays.
        pass
    return [
        f"jdp/bucket_{number}/{_format(paths[bucket[0]]) or f'leaf_{bucket[0]}'}"
        for number, bucket in enumerate(sent)
    ]


def _format(path: KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
