"""Pallas: the custom all-reduce of inference engines, as a GPU kernel of JAX.

On one NVLink host, NCCL spends most of a small all-reduce on latency. In this kernel
each GPU reads the buffers of its peers itself. XLA does for a "collective" Mosaic GPU
kernel, which reads from peers, what the classical interface (vLLM's `CustomAllreduce`
and its successors) does by hand. Its calls map as follows:

- `create_shared_buffer`, `free_shared_buffer`: the temporary buffer is an output of the
  kernel, allocated by XLA's buffer assignment like any other, and dropped.
- The signal flags in it (`meta_ptrs`): semaphores in the kernel's scratch. The program
  sets them to zero before each launch, so there is no flag to reset and no counter that
  outlives a call.
- The exchange of handles (`cudaIpcGetMemHandle`, all-gather, `cudaIpcOpenMemHandle`):
  XLA's collective metadata, an argument of the kernel that holds the address of each of
  its parameters on every device; `uses_xla_collective_metadata` in the lowered text.
- `register_buffer`, and the copy of other inputs into a registered buffer: XLA knows
  all addresses before it launches, so every buffer counts as registered. With several
  processes it allocates the kernel's buffers in memory that all processes have mapped.
- `rank_data`, the pool of pointers on the GPU: the collective metadata again.
- `capture` and `register_graph_buffers`: XLA's command buffers (CUDA graphs) record
  the compiled program, when buffers have their addresses. Since JAX 0.12 the kernel is
  in the graph; before, one graph ends where it is launched, and another begins.
- The barrier at the start (`barrier_at_start`): XLA synchronises all devices before it
  launches such a kernel. The barriers between the stages and at the end are in the
  kernel (`Peers.meet`).
- `cross_device_reduce_1stage`, `cross_device_reduce_2stage`: `one_stage` and
  `two_stage` of `jdp.collectives.pallas.bodies`.
- `should_custom_ar`: `should_use_custom`; `custom_all_reduce`, which decides and falls
  back: `all_reduce="auto"`.
"""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp

from jdp import types
from jdp.collectives import base
from jdp.collectives.base import Op
from jdp.collectives.pallas import choice
from jdp.collectives.pallas.choice import (
    DTYPES,
    MULTIMEM_DTYPE,
    THRESHOLDS,
    Algorithm,
    Limits,
    Thresholds,
)
from jdp.compat import annotations
from jdp.types import AllReduce, AxisName


@dataclasses.dataclass(frozen=True)
class PallasAllReduce:
    """Reduces among the GPUs of one host, which read each other's memory over NVLink.

    Sums are kept in float32 and rounded once; all replicas get the same bits. It has no
    derivative and runs only under `shard_map`, on GPUs of compute capability 9.0 or
    more. It does not check whether the GPUs can read each other's memory;
    `all_reduce="auto"` does, and uses `psum` if they cannot.

    Attributes:
      algorithm: "one_stage", "two_stage", or "multimem", in which the NVLink switch
        reduces, only float32; None: chosen by the size of the buffer.
      thresholds: sizes at which the algorithm changes, and the largest size.
    """

    algorithm: Algorithm | None = None
    thresholds: Thresholds = THRESHOLDS

    def __post_init__(self):
        if self.algorithm not in (None, *get_args(Algorithm)):
            raise ValueError(
                f"`algorithm` must be {', '.join(get_args(Algorithm))} or None, got "
                f"{self.algorithm!r}."
            )

    @property
    def value(self) -> AllReduce:
        """This reduction as an `AllReduce`."""
        return AllReduce(self, takes_scale=True, name="pallas")

    def __call__(
        self,
        x: jax.Array,
        axis_name: AxisName,
        *,
        op: Op = "sum",
        scale: jax.typing.ArrayLike | None = None,
    ) -> jax.Array:
        """Reduces one buffer among the GPUs of one host, over NVLink.

        The contract is in `jdp.collectives.base`. Sums are kept in float32. A buffer of
        at least 2 KiB and a multiple of 16 bytes is read in place. Others are padded,
        which XLA fuses into the operation that writes them.

        Args:
          x: shape (n,), float32, bfloat16 or float16, at most 8 MiB.
          axis_name: the axis, or axes, over which replicas lie: 2, 4, 6 or 8.
          op: "sum" or "mean".
          scale: factor of the sum before it is rounded, a number or float32 (), the
            same on all replicas; not with `op="mean"`.

        Returns:
          Shape (n,), dtype of `x`, the same on all replicas.

        Raises:
          ValueError: `x` is not flat or too large, `scale` is not a scalar, `op` or the
            number of replicas is not supported, or this is not under `shard_map`.
          TypeError: the dtype is not supported.
          NotImplementedError: when compiled for another platform than CUDA.
        """
        if op not in ("sum", "mean"):
            raise ValueError(f"The Pallas kernel takes op 'sum' or 'mean', got {op!r}.")
        if op == "mean" and scale is not None:
            raise ValueError("Pass `op='mean'` or `scale=`, not both.")
        x, group = base.enter(x, axis_name, op)
        if group.size == 1 or x.size == 0:
            alone = x if scale is None else (x * scale).astype(x.dtype)
            return base.replicated(alone, axis_name)
        limits = self.thresholds.get(group.size)
        algorithm = self.algorithm or choice.choose_algorithm(
            x.nbytes, group.size, thresholds=self.thresholds
        )
        _check(x, algorithm, limits)
        names = set(types.as_axis_names(axis_name))
        if not names <= set(jax.sharding.get_abstract_mesh().manual_axes):
            raise ValueError(
                "The Pallas kernel runs under `shard_map`, where every replica is a "
                f"device; `axis_name={axis_name!r}` is an axis of `vmap` or `pmap`."
            )
        device = jax.sharding.get_abstract_mesh().abstract_device
        max_blocks = choice.limit_blocks(
            limits.max_blocks, None if device is None else device.num_cores
        )
        launch = choice.default_launch(
            x.nbytes, group.size, algorithm, max_blocks=max_blocks
        )
        if op == "mean":
            scale = 1.0 / group.size
        if scale is not None and not isinstance(scale, float):
            if jnp.shape(scale) != ():
                raise ValueError(f"`scale` must be a scalar, got {jnp.shape(scale)}.")
            scale = jnp.asarray(scale, jnp.float32).reshape(1)
        # Importing Pallas takes a third of a second, so only when it is used.
        from jdp.collectives.pallas import kernel_launch

        x = annotations.only_for(x, "cuda", _NOT_A_GPU)
        y = kernel_launch.all_reduce_on_replicas(
            x, axis_name, group.size, algorithm, launch, scale
        )
        return base.replicated(y, axis_name)


def _check(x: jax.Array, algorithm: Algorithm, limits: Limits) -> None:
    if jnp.dtype(x.dtype).name not in DTYPES:
        raise TypeError(
            f"The Pallas kernel takes {', '.join(DTYPES)}, got {x.dtype}. Cast `x`, or "
            "use `jdp.collectives.psum_all_reduce`."
        )
    if algorithm == "multimem" and x.dtype != MULTIMEM_DTYPE:
        # JAX (0.10 to 0.12) has no way to say `.acc::f32` for 16-bit floats.
        raise TypeError(
            f"`algorithm='multimem'` takes {MULTIMEM_DTYPE}, got {x.dtype}: the NVLink "
            "switch would add that up in 16 bits. Cast `x`, or use another algorithm."
        )
    if x.nbytes > limits.max_bytes:
        raise ValueError(
            f"The Pallas kernel takes at most {limits.max_bytes} bytes of "
            f"{limits.num_replicas} replicas, got {x.nbytes}. Use "
            "`jdp.collectives.psum_all_reduce`, or other `thresholds`."
        )


pallas_all_reduce = PallasAllReduce()
# `help(pallas_all_reduce)` shows how it is called, not how the class is.
object.__setattr__(pallas_all_reduce, "__doc__", PallasAllReduce.__call__.__doc__)

_NOT_A_GPU = (
    "The Pallas kernel runs on NVIDIA GPUs, and this is compiled for {platform}. Use "
    "`all_reduce='auto'`, which takes `psum` there."
)
