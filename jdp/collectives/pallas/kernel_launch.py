"""Kernel launch: the kernels of the custom all-reduce, on real and virtual peers."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdp import compat
from jdp.collectives.pallas import bodies
from jdp.collectives.pallas.choice import Algorithm, Launch
from jdp.collectives.pallas.peers import (
    BLOCK_AXIS,
    RANK_AXIS,
    VECTOR_BYTES,
    WARPGROUP,
    WARPGROUP_AXIS,
    ClusterPeers,
    Peers,
    RemotePeers,
    SoloPeers,
    Tiling,
)
from jdp.types import AxisName

# The default, which changed in JAX 0.11, cannot express the alignment of loads.
_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
# JAX puts a barrier of the warpgroup before and after each store, 16 in an iteration of
# the second stage of 8 replicas, so that loads wait for the loads of all other warps. A
# barrier is needed only between writes of a warpgroup and reads of the same data, by it
# or by a peer. There it meets the peers, which begins and ends with a barrier
# (`mosaic_kernels.SignalAll`, `pl.semaphore_wait`). Before that, each thread stores to
# places of its own. Where the tail overlaps with the last whole tile, two threads of a
# warpgroup store the same bits.
_WITHOUT_BARRIERS = dataclasses.replace(_PARAMS, unsafe_no_auto_barriers=True)
_ONE_PASS: dict[Algorithm, Callable[..., None]] = {
    "one_stage": bodies.one_stage,
    "multimem": bodies.multimem,
}

Scale = float | jax.Array | None  # float32 (1,), if an array.


def all_reduce_on_replicas(
    x: jax.Array,
    axis_name: AxisName,
    num_replicas: int,
    algorithm: Algorithm,
    launch: Launch,
    scale: Scale = None,
) -> jax.Array:
    """Runs the kernel on the GPUs of an axis.

    Args:
      x: shape (n,).
      axis_name: the axis, or axes, over which replicas lie.
      num_replicas: size of the axis.
      algorithm: name of the body.
      launch: threads of the kernel.
      scale: factor of the sum in float32, the same on all replicas.

    Returns:
      Shape (n,).
    """
    tiling = make_tiling(x.size, x.dtype, num_replicas, algorithm, launch)
    peers = RemotePeers(tiling, axis_name)
    y = jax.ShapeDtypeStruct((tiling.size,), x.dtype)
    part = jax.ShapeDtypeStruct((tiling.part_size,), x.dtype)
    kernel = _make_kernel(peers, tiling, algorithm, y, part, scale)
    # To JAX's types, the result of a kernel is the same on all replicas.
    reduced = compat.cast_varying(
        kernel(_pad(x, tiling.size)), sorted(compat.varying_axes(x))
    )
    return reduced[: x.size]


def all_reduce_in_cluster(
    xs: jax.Array, algorithm: Algorithm, launch: Launch, scale: Scale = None
) -> jax.Array:
    """Runs all replicas on one GPU, as blocks of a cluster.

    Args:
      xs: shape (num_replicas, n), at most 8 replicas.
      algorithm: "one_stage" or "two_stage".
      launch: threads of one replica.
      scale: factor of the sum.

    Returns:
      Shape (num_replicas, n): the result of each replica.
    """
    n, size = xs.shape
    tiling = make_tiling(size, xs.dtype, n, algorithm, launch)
    y = jax.ShapeDtypeStruct((n, tiling.size), xs.dtype)
    part = jax.ShapeDtypeStruct((n, tiling.part_size), xs.dtype)
    kernel = _make_kernel(
        ClusterPeers(tiling), tiling, algorithm, y, part, scale, cluster_size=n
    )
    return kernel(_pad(xs, tiling.size))[:, :size]


class SoloKernel(NamedTuple):
    """Kernel with the work of one replica, to be timed alone."""

    run: Callable[[jax.Array, jax.Array | None], jax.Array]  # (xs, parts) -> y
    part_shape: tuple[int, int]  # shape of `parts`: one row per replica.


def all_reduce_alone(
    num_replicas: int,
    size: int,
    dtype: Any,
    algorithm: Algorithm,
    launch: Launch,
    *,
    rank: int = 0,
) -> SoloKernel:
    """Makes the kernel with the work of one replica, on one GPU.

    Args:
      num_replicas: number of replicas, including this one.
      size: elements of a replica's buffer, a multiple of 16 bytes and not padded.
      dtype: dtype of the buffer.
      algorithm: "one_stage" or "two_stage".
      launch: threads of the kernel.
      rank: rank of the replica.

    Returns:
      The kernel. Its inputs are the buffers of all replicas, shape (num_replicas,
      size), and for two stages the parts (see `parts_of`); it returns shape (size,).
    """
    tiling = make_tiling(size, dtype, num_replicas, algorithm, launch)
    assert tiling.size == size, (tiling.size, size)
    peers = SoloPeers(tiling, rank)
    y = jax.ShapeDtypeStruct((size,), dtype)
    part = jax.ShapeDtypeStruct((tiling.part_size,), dtype)
    kernel = _make_kernel(peers, tiling, algorithm, y, part, None, is_solo=True)

    def run(xs: jax.Array, parts: jax.Array | None) -> jax.Array:
        return kernel(xs) if parts is None else kernel(xs, parts)

    return SoloKernel(run, (num_replicas, tiling.part_size))


def parts_of(xs: jax.Array, launch: Launch, *, rank: int = 0) -> jax.Array:
    """Returns the sums of peers after the first stage, and NaN in the row of `rank`.

    Args:
      xs: shape (num_replicas, n), where n needs no padding.
      launch: threads of the kernel.
      rank: rank of the replica that sums its part itself.

    Returns:
      Shape (num_replicas, part_size).
    """
    n, size = xs.shape
    t = make_tiling(size, xs.dtype, n, "two_stage", launch)
    total = jnp.sum(xs.astype(jnp.float32), 0).astype(xs.dtype)
    width = n * t.tiles_per_part * t.tile
    whole = jnp.pad(total[:width], (0, max(0, width - size)))
    parts = whole.reshape(n, t.tiles_per_part * t.tile)
    if t.has_tail:
        tail = jnp.tile(total[-t.tile :], (n, 1))
        parts = jnp.concatenate([parts, tail], axis=1)
    return parts.at[rank].set(jnp.nan)


def make_tiling(
    size: int, dtype: Any, num_replicas: int, algorithm: Algorithm, launch: Launch
) -> Tiling:
    """Cuts a buffer of `size` elements, padded if needed, into tiles."""
    vector = VECTOR_BYTES // jnp.dtype(dtype).itemsize
    tile = WARPGROUP * vector * launch.unroll
    multiple = tile if algorithm == "multimem" else vector
    padded = max(tile, -(-size // multiple) * multiple)
    return Tiling(
        num_replicas,
        padded,
        jnp.dtype(dtype),
        launch.num_blocks,
        launch.num_warpgroups,
        launch.unroll,
    )


def _pad(x: jax.Array, size: int) -> jax.Array:
    """Pads the last dimension to `size`, without a copy if it has that size."""
    missing = size - x.shape[-1]
    widths = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
    return jnp.pad(x, widths) if missing else x


def _make_kernel(
    peers: Peers,
    tiling: Tiling,
    algorithm: Algorithm,
    y_type: jax.ShapeDtypeStruct,
    part_type: jax.ShapeDtypeStruct,
    scale: Scale,
    *,
    cluster_size: int | None = None,
    is_solo: bool = False,
) -> Callable[..., jax.Array]:
    """Returns a function of the inputs that launches a body."""
    has_parts = algorithm == "two_stage"
    has_scale = isinstance(scale, jax.Array)

    def run(*refs: Any) -> None:
        x, *rest = refs
        others = rest.pop(0) if has_parts and is_solo else None
        factor = rest.pop(0) if has_scale else scale
        y = rest.pop(0)
        if has_parts:
            part = rest.pop(0)
            peers.enter(*rest)
            own_and_others = (part, others) if is_solo else part
            bodies.two_stage(peers, tiling, x, y, own_and_others, factor)
        else:
            peers.enter(*rest)
            _ONE_PASS[algorithm](peers, tiling, x, y, factor)

    options: dict[str, Any] = {}
    if cluster_size is not None:
        options = dict(cluster=(cluster_size,), cluster_names=(RANK_AXIS,))
    kernel = plgpu.kernel(
        run,
        # The temporary buffer is an output: Pallas has no scratch in global memory.
        out_type=[y_type, part_type] if has_parts else [y_type],
        scratch_types=peers.scratch(),
        grid=(tiling.num_blocks,),
        grid_names=(BLOCK_AXIS,),
        num_threads=tiling.num_warpgroups,
        thread_name=WARPGROUP_AXIS,
        kernel_name=f"jdp_{algorithm}_all_reduce",
        # The signals of `multimem` have no barrier of their own.
        compiler_params=_PARAMS if algorithm == "multimem" else _WITHOUT_BARRIERS,
        **options,
    )
    return lambda *xs: kernel(*xs, *([scale] if has_scale else []))[0]


def do_nothing(launch: Launch) -> Callable[[jax.Array], jax.Array]:
    """Returns a kernel with threads and counters, but without work.

    It takes an array and returns an array of the same shape and dtype, with undefined
    values.
    """

    def kernel(x: jax.Array) -> jax.Array:
        return plgpu.kernel(
            lambda *_: None,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_types=[plgpu.SemaphoreType.REGULAR((launch.num_warpgroups,))],
            grid=(launch.num_blocks,),
            grid_names=(BLOCK_AXIS,),
            num_threads=launch.num_warpgroups,
            thread_name=WARPGROUP_AXIS,
            kernel_name="jdp_nothing",
            compiler_params=_PARAMS,
        )(x)

    return kernel
