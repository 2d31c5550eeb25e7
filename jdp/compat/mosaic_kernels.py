"""Mosaic kernels: signals to peers, and loads from their memory, on GPUs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_WARPGROUP = 128  # threads.


@dataclasses.dataclass(frozen=True)
class SignalAll:
    """Adds one to a counter of every peer: lane i of the warpgroup signals peer i.

    Lanes of one warp run together, so this takes one system fence and one atomic per
    lane, whatever the number of peers. JAX has nothing like it. One thread runs
    `semaphore_signal`, so each call waits for a fence of its own.
    `semaphore_signal_parallel` signals before its fence, not after it (0.10 to 0.12),
    so a peer may wake up before it can see the data.

    By the memory model of PTX (PTX ISA, "Causality order"), all earlier reads and
    writes of the warpgroup happen before the peer's wait returns. `bar.sync`
    synchronizes each thread of the warpgroup with each lane that signals. The lane's
    `red.release.sys`, a fence and an atomic add, is cumulative over earlier operations
    of its thread, the barrier included. The peer's `ld.relaxed.sys`,
    `fence.acquire.sys` and `bar.sync` in `semaphore_wait` synchronize all its threads
    with that lane. Scopes are `sys`, so this holds between GPUs.

    An instance is the function in a `plgpu.inline_mgpu`; interpreters of kernels find
    it as `mgpu_fn`. Its arguments are the reference to the counter, or counters, and,
    if `is_remote`, the index of a device.

    Attributes:
      offsets: one per peer. If `is_remote`, its distance behind the device that is
        passed, in the order of the mesh; otherwise the number of its counter.
      is_remote: whether peers are devices; otherwise all counters are on this device.
    """

    offsets: tuple[int, ...]
    is_remote: bool

    def __post_init__(self):
        assert 1 <= len(self.offsets) <= 32, "the lanes of one warp"

    def __call__(self, context: Any, counters: Any, *first: Any) -> None:
        """Emits the code while the kernel is lowered."""
        import jax.experimental.mosaic.gpu as mgpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        i32 = ir.IntegerType.get_signless(32)
        thread = mgpu.utils.thread_idx()
        lane = arith.remui(thread, mgpu.utils.c(_WARPGROUP, i32))
        count = mgpu.utils.c(len(self.offsets), i32)
        is_peer = arith.cmpi(arith.CmpIPredicate.ult, lane, count)
        # The other lanes look up the address of the first peer.
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
    """In a Mosaic GPU kernel: adds one to counters on this device; see `SignalAll`.

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
      offsets: distance of each lane's peer behind that device.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    signal = SignalAll(offsets, is_remote=True)
    types = (plgpu.RefType(), plgpu.Layout.WG_SPLAT)
    plgpu.inline_mgpu(arg_types=types)(signal)(counter, first)


def load_from_peer(ref: Any, device: Any, layout: Any, vector: int) -> Any:
    """In a Mosaic GPU kernel: loads from the memory of a peer, 16 bytes at a time.

    JAX 0.10 compiles a load through `plgpu.remote_ref` to loads of one element, since
    it does not know the alignment of the peer's pointer.

    Args:
      ref: a slice of an argument of the kernel, shape (n,); n is a multiple of 128
        threads with `vector` elements each.
      device: position of the peer, a dict by the name of the mesh axis; on other axes
        it has the position of this device.
      layout: layout of the result.
      vector: number of elements in 16 bytes.

    Returns:
      Shape (n,).
    """
    # Takes a third of a second to import, and only kernels need it.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if jax.__version_info__ >= _WIDE_PEER_LOADS:
        return plgpu.layout_cast(plgpu.remote_ref(ref, device)[...], layout)
    index: Any = 0
    for name, size in jax.sharding.get_abstract_mesh().shape.items():
        index = index * size + (
            device[name] if name in device else lax.axis_index(name)
        )
    loaded = jax.ShapeDtypeStruct(ref.shape, ref.dtype)
    return _load_wide(loaded, layout, vector)(ref, jnp.asarray(index, jnp.int32))


_WIDE_PEER_LOADS = (0, 12)


def _load_wide(loaded: jax.ShapeDtypeStruct, layout: Any, vector: int) -> Any:
    """Returns an `inline_mgpu` load that states its alignment."""
    import jax.experimental.mosaic.gpu as mgpu
    import numpy as np
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    num_vectors = loaded.size // (128 * vector)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(loaded.shape, loaded.dtype, layout=layout),
    )
    def load_from_peer(context, local, peer):
        element = ir.MemRefType(local.type).element_type
        i32 = ir.IntegerType.get_signless(32)
        four_words = ir.VectorType.get((4,), i32)
        several = ir.VectorType.get((vector,), element)
        remote = context.to_remote(local, peer.registers.flat[0])
        base = llvm.addrspacecast(
            ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(remote)
        )
        lane = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(128, i32))
        registers = np.empty((num_vectors,), dtype=object)
        for i in range(num_vectors):
            at = arith.addi(lane, mgpu.utils.c(i * 128, i32))
            pointer = mgpu.utils.getelementptr(base, [at], four_words)
            words = llvm.load(four_words, pointer, alignment=16)
            registers[i] = llvm.bitcast(several, words)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=layout.to_mgpu(), _is_signed=None
        )

    return load_from_peer
