"""Compat, kernels: how does a warpgroup of a Mosaic GPU kernel signal all its peers?"""

import dataclasses
from typing import Any

_WARPGROUP = 128  # threads.


@dataclasses.dataclass(frozen=True)
class SignalAll:
    """Adds one to a counter of every peer: lane i of the warpgroup signals peer i.

    Lanes of one warp run it together, so that it takes one system fence and one atomic
    per lane, whatever the number of peers. JAX has nothing like that: its
    `semaphore_signal` is done by one thread, so that several calls wait for a fence
    each, and its `semaphore_signal_parallel` signals before its fence and not after it
    (0.10 to 0.12), so that a peer may be woken before it can see the data.

    Whatever a thread of the warpgroup has read or written before is before the signal
    for the peer that waits for it, by the memory model of PTX (PTX ISA, "Causality
    order"): `bar.sync` synchronizes each thread of the warpgroup with each lane that
    signals; the lane's `red.release.sys`, a fence and an atomic add, is cumulative over
    what happened before it in its own thread, which includes the barrier; and the
    peer's `ld.relaxed.sys`, `fence.acquire.sys` and `bar.sync` in `semaphore_wait`
    synchronize all its threads with that lane. Scopes are `sys`, so that this holds
    between GPUs.

    It is the function in a `plgpu.inline_mgpu`, which interpreters of kernels find as
    `mgpu_fn`: its arguments are the reference to the counter, or counters, and, if
    `is_remote`, the index of a device.

    Attributes:
      offsets: of each peer. If `is_remote`, how many devices it lies behind the device
        that is passed, in the order of the mesh; otherwise the number of its counter.
      is_remote: whether peers are devices; otherwise their counters lie in this one.
    """

    offsets: tuple[int, ...]
    is_remote: bool

    def __post_init__(self):
        """Checks itself."""
        assert 1 <= len(self.offsets) <= 32, "the lanes of one warp"

    def __call__(self, context: Any, counters: Any, *first: Any) -> None:
        """Emits the code, when the kernel is lowered."""
        import jax.experimental.mosaic.gpu as mgpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        i32 = ir.IntegerType.get_signless(32)
        thread = mgpu.utils.thread_idx()
        lane = arith.remui(thread, mgpu.utils.c(_WARPGROUP, i32))
        count = mgpu.utils.c(len(self.offsets), i32)
        is_peer = arith.cmpi(arith.CmpIPredicate.ult, lane, count)
        # The other lanes look up an address too: that of the first peer.
        offset = self._offset(arith.select(is_peer, lane, mgpu.utils.c(0, i32)))
        if self.is_remote:
            (device,) = first
            peer = arith.addi(device.registers.flat[0], offset)
            remote = context.to_remote(counters, peer)
            pointer = mgpu.utils.memref_ptr(remote)
        else:
            base = mgpu.utils.memref_ptr(counters)
            pointer = mgpu.utils.getelementptr(base, [offset], i32)
        mgpu.utils.warpgroup_barrier()
        mgpu.utils.SemaphoreRef(pointer).signal(1, predicate=is_peer)

    def _offset(self, lane: Any) -> Any:
        import jax.experimental.mosaic.gpu as mgpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        i32 = ir.IntegerType.get_signless(32)
        start = self.offsets[0]
        offset = mgpu.utils.c(start, i32)
        step = self.offsets[-1] - self.offsets[-2] if len(self.offsets) > 1 else 0
        if self.offsets == tuple(start + step * i for i in range(len(self.offsets))):
            return arith.addi(arith.muli(lane, mgpu.utils.c(step, i32)), offset)
        for i, each in enumerate(self.offsets[1:], 1):  # Axes that are not neighbours.
            is_it = arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu.utils.c(i, i32))
            offset = arith.select(is_it, mgpu.utils.c(each, i32), offset)
        return offset


def signal_all(counters: Any, offsets: tuple[int, ...]) -> None:
    """In a Mosaic GPU kernel: adds one to counters of this device; see `SignalAll`.

    Args:
      counters: reference to a semaphore, or to several, shape (n,).
      offsets: the number of the counter that each lane signals.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    signal = SignalAll(offsets, is_remote=False)
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(signal)(counters)


def signal_all_devices(counter: Any, first: Any, offsets: tuple[int, ...]) -> None:
    """In a Mosaic GPU kernel: adds one to a counter on devices; see `SignalAll`.

    Args:
      counter: reference to a semaphore in the kernel's scratch.
      first: int32 (), the index of a device in the mesh.
      offsets: how many devices behind it the peer of each lane lies.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    signal = SignalAll(offsets, is_remote=True)
    types = (plgpu.RefType(), plgpu.Layout.WG_SPLAT)
    plgpu.inline_mgpu(arg_types=types)(signal)(counter, first)
