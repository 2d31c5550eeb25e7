"""Runs Pallas Mosaic GPU kernels on the CPU, on many devices, and finds races.

JAX's interpret mode knows neither remote references nor semaphores (0.10 to 0.12). This
one runs the jaxpr that is lowered for GPUs, every warpgroup as a coroutine:

- A seeded scheduler picks who goes next at every access to memory and every signal, so
  that many orders can be tried. If nobody can go on, that is a deadlock, at once.
- Vector clocks order accesses by signals and waits alone. Two that are not ordered,
  one of them a write, are a race, in whatever order they happened to run.
- When the last warpgroup of a device is done, its buffers belong to the program again,
  as if it wrote to them: who reads them later without order is a race too.
- A wait is taken to be ordered after the first signals that suffice, not after others
  that happen to have come.
- Memory that nobody has written holds NaN.
"""

import collections
import dataclasses
import functools
import itertools
import math
import operator
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jdp.compat.mosaic_kernels import SignalAll


class DeadlockError(Exception):
    """Nobody can go on."""


@dataclasses.dataclass
class Outcome:
    """What replicas got, and who was not ordered with whom."""

    results: list[np.ndarray]  # one a replica.
    races: list[str]


def run_on_replicas(fn, xs, *, mesh_shape=None, seed=0) -> Outcome:
    """Runs `fn`, a function of one buffer that holds a kernel, on all replicas.

    Args:
      fn: what `shard_map` would run: (buffer, axis_name) -> buffer.
      xs: shape (num_replicas, n).
      mesh_shape: sizes by axis name; one axis if None.
      seed: of the schedule.
    """
    sizes = mesh_shape or {"data": len(xs)}
    names = tuple(sizes)
    mesh = jax.sharding.AbstractMesh(
        tuple(sizes.values()),
        names,
        axis_types=(jax.sharding.AxisType.Auto,) * len(names),
    )
    spec = jax.sharding.PartitionSpec(names)
    axis_name = names if len(names) > 1 else names[0]
    mapped = jax.shard_map(
        lambda x: fn(x[0], axis_name)[None], mesh=mesh, in_specs=spec, out_specs=spec
    )
    sharding = jax.sharding.NamedSharding(mesh, spec)
    aval = jax.ShapeDtypeStruct(xs.shape, xs.dtype, sharding=sharding)
    jaxpr = jax.jit(mapped).trace(aval).jaxpr.jaxpr
    (eqn,) = (e for e in _flatten_calls(jaxpr) if e.primitive.name == "shard_map")
    program = _Program(sizes, seed)
    (result,) = program.run(eqn.params["jaxpr"], [[np.asarray(x)[None] for x in xs]])
    return Outcome([np.asarray(r)[0] for r in result], program.races)


def run_on_one(fn, *args, seed=0) -> Outcome:
    """Runs `fn`, a function of arrays that holds a kernel, on one device."""
    program = _Program({}, seed)
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    (result,) = program.run(jaxpr, [[np.asarray(x)] for x in args])
    return Outcome([np.asarray(result[0])], program.races)


def _flatten_calls(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("jit", "pjit"):
            yield from _flatten_calls(eqn.params["jaxpr"].jaxpr)
        yield eqn


def _open(jaxpr):
    return getattr(jaxpr, "jaxpr", jaxpr)  # JAX 0.12 has one class for both.


def _bind(jaxpr, args, lift):
    """The variables of a jaxpr by their values; its constants, unless args has them."""
    inner = _open(jaxpr)
    variables = [*inner.constvars, *inner.invars]
    if len(args) < len(variables):
        args = [*map(lift, jaxpr.consts), *args]
    return dict(zip(variables, args, strict=True))


class _Program:
    """The program around a kernel, on all devices in lockstep."""

    def __init__(self, mesh_shape, seed):
        self.mesh_shape = mesh_shape
        self.num_devices = math.prod(mesh_shape.values())
        self.seed = seed
        self.races: list[str] = []

    def run(self, jaxpr, args):
        """Runs a jaxpr on values that are lists with an entry for each device."""
        env = _bind(jaxpr, args, lambda const: [const] * self.num_devices)

        def read(v):
            return [v.val] * self.num_devices if isinstance(v, core.Literal) else env[v]

        for eqn in _open(jaxpr).eqns:
            outs = self._run_equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in _open(jaxpr).outvars]

    def _run_equation(self, eqn, args):
        match eqn.primitive.name:
            case "mpmd_map":
                return _run_kernel(self, eqn, args)
            case "jit" | "pjit" | "closed_call":
                return self.run(eqn.params["jaxpr"], args)
            case "custom_vmap_call":
                return self.run(eqn.params["call"], args)
            case "jdp_replicated" | "jdp_only_for" | "pvary" | "pcast":
                return args
            case "axis_index":
                name = eqn.params["axis_name"]
                return [
                    [np.int32(self.place(d)[name]) for d in range(self.num_devices)]
                ]
        by_device = [
            eqn.primitive.bind(*map(jnp.asarray, a), **eqn.params)
            for a in zip(*args, strict=True)
        ]
        if not eqn.primitive.multiple_results:
            return [by_device]
        return [list(outs) for outs in zip(*by_device, strict=True)]

    def place(self, device):
        """Where a device lies, by axis name."""
        at = np.unravel_index(device, tuple(self.mesh_shape.values()))
        return dict(zip(self.mesh_shape, map(int, at), strict=True))

    def device_at(self, place):
        """The inverse of `place`."""
        at = tuple(int(place[name]) for name in self.mesh_shape)
        return int(np.ravel_multi_index(at, tuple(self.mesh_shape.values())))


# -------------------------------------------------------------------------- memory


class _Memory:
    """A buffer of one device, and who accessed each element when."""

    def __init__(self, name, device, values, num_threads):
        self.name, self.device = name, device
        self.values = values.reshape(-1)
        self.positions = np.arange(values.size).reshape(values.shape)
        self.writer = np.zeros(values.size, np.int32)
        self.write_time = np.zeros(values.size, np.int32)
        self.read_times = np.zeros((num_threads, values.size), np.int32)


@dataclasses.dataclass(frozen=True)
class _Ref:
    """Elements of the buffers that have one name on all devices."""

    memories: list[_Memory]  # one a device.
    device: int
    positions: np.ndarray

    def transform(self, transforms, kernel):
        ref = self
        for t in transforms:
            if type(t).__name__ == "PeerMemRef":
                device = kernel.find_device(self.device, t.device_id)
                ref = dataclasses.replace(ref, device=device)
            else:
                ref = dataclasses.replace(ref, positions=_index(ref.positions, t))
        return ref

    @property
    def memory(self):
        return self.memories[self.device]


def _index(positions, indexer):
    assert type(indexer).__name__ == "NDIndexer", indexer
    key = []
    for i, size in zip(indexer.indices, positions.shape, strict=True):
        if type(i).__name__ == "Slice":
            start = int(i.start)
            end = start + (i.size - 1) * i.stride + 1
            assert 0 <= start and end <= size, f"out of bounds: {start}:{end} of {size}"
            key.append(slice(start, end, i.stride))
        else:
            assert 0 <= int(i) < size, f"out of bounds: {int(i)} of {size}"
            key.append(int(i))
    return positions[tuple(key)]


class _Semaphore:
    def __init__(self):
        self.signals: list[np.ndarray] = []  # the clock of each, in order of arrival.


@dataclasses.dataclass(frozen=True)
class _SemaphoreRef:
    """Counters that have one name on all devices."""

    table: dict  # (device, position) -> _Semaphore
    key: tuple
    device: int
    positions: np.ndarray

    def transform(self, transforms, kernel):
        ref = self
        for t in transforms:
            ref = dataclasses.replace(ref, positions=_index(ref.positions, t))
        return ref

    def get(self, device=None):
        assert self.positions.size == 1, "one semaphore at a time"
        device = self.device if device is None else device
        return self.table[(*self.key, device, int(self.positions.reshape(-1)[0]))]


# -------------------------------------------------------------------------- kernel


@dataclasses.dataclass
class _Thread:
    """A warpgroup."""

    index: int
    device: int
    places: dict[str, int]  # in the grid, the cluster and the block.
    clock: np.ndarray
    runs_of: collections.Counter = dataclasses.field(
        default_factory=collections.Counter
    )

    @property
    def name(self):
        places = ", ".join(f"{k} {v}" for k, v in self.places.items())
        return f"device {self.device}, {places}"


def _run_kernel(program, eqn, args):
    (jaxpr,), (mesh,) = eqn.params["jaxprs"], eqn.params["meshes"]
    axes = dict(zip(mesh.grid_names, mesh.grid, strict=True))
    axes |= dict(zip(mesh.cluster_names, mesh.cluster, strict=True))
    if mesh.thread_name is not None:
        axes[mesh.thread_name] = mesh.num_threads or 1
    places = [
        dict(zip(axes, at, strict=True))
        for at in itertools.product(*map(range, axes.values()))
    ]
    devices = range(program.num_devices)
    # The last ones are the programs of the devices, into which kernels return.
    num_threads = program.num_devices * (len(places) + 1)
    buffers = []
    for i, values in enumerate(args):
        copies = [np.array(v) for v in values]
        buffers.append(
            [_Memory(f"input {i}", d, copies[d], num_threads) for d in devices]
        )
    for i, aval in enumerate(eqn.params["out_avals"]):
        fill = np.full(aval.shape, np.nan, aval.dtype)
        buffers.append(
            [_Memory(f"output {i}", d, fill.copy(), num_threads) for d in devices]
        )
    kernel = _Kernel(program, axes, mesh.thread_name, num_threads)
    threads = []
    for index, (device, place) in enumerate(itertools.product(devices, places)):
        clock = np.zeros(num_threads, np.int32)
        clock[index] = 1
        threads.append(_Thread(index, device, place, clock))
    coroutines = {}
    for thread in threads:
        refs = [_Ref(b, thread.device, b[0].positions) for b in buffers]
        coroutines[thread.index] = kernel.run(thread, jaxpr, refs)
    _schedule(kernel, threads, coroutines, buffers, random.Random(program.seed))
    outputs = buffers[len(args) :]
    return [
        [m.values.reshape(m.positions.shape) for m in memories] for memories in outputs
    ]


def _schedule(kernel, threads, coroutines, buffers, rng):
    waiting: dict[int, tuple] = {}
    running = {t.index: t for t in threads}
    left = collections.Counter(t.device for t in threads)
    while running:
        ready = [
            i
            for i in running
            if i not in waiting or len(waiting[i][0].signals) >= waiting[i][1]
        ]
        if not ready:
            who = "\n".join(
                f"{running[i].name}: {len(w[0].signals)} of {w[1]} signals came"
                for i, w in waiting.items()
            )
            raise DeadlockError(who)
        index = rng.choice(ready)
        thread = running[index]
        if index in waiting:
            semaphore, count = waiting.pop(index)
            for clock in semaphore.signals[:count]:
                np.maximum(thread.clock, clock, out=thread.clock)
        try:
            # Some steps at once, now and then many: not all orders are equally likely.
            for _ in range(rng.choice((1, 1, 4, 64))):
                request = next(coroutines[index])
                if request is not None:
                    waiting[index] = request
                    break
        except StopIteration:
            del running[index]
            left[thread.device] -= 1
            if not left[thread.device]:
                kernel.leave(thread.device, threads, buffers)


class _Kernel:
    """Runs the jaxpr of a kernel as a coroutine; it yields a wait, or None."""

    def __init__(self, program, axes, thread_name, num_threads):
        self.program, self.axes, self.thread_name = program, axes, thread_name
        self.num_threads = num_threads
        self.semaphores: dict = collections.defaultdict(_Semaphore)

    def find_device(self, device, device_id):
        """The device that `device` means."""
        place = self.program.place(device)
        if isinstance(device_id, dict):
            return self.program.device_at(place | device_id)
        (name,) = place  # A scalar is meant for a mesh of one axis.
        return self.program.device_at({name: device_id})

    def leave(self, device, threads, buffers):
        """The kernel of a device returns: the program may write to its buffers."""
        index = len(threads) + device
        clock = np.zeros(self.num_threads, np.int32)
        for thread in threads:
            if thread.device == device:
                np.maximum(clock, thread.clock, out=clock)
        clock[index] = 1
        program = _Thread(index, device, {"its program": 0}, clock)
        for memories in buffers:
            self._note_write(program, memories[device], memories[device].positions)

    def run(self, thread, jaxpr, args):
        env = _bind(jaxpr, args, lambda const: const)

        def read(v):
            return v.val if isinstance(v, core.Literal) else env[v]

        for eqn in _open(jaxpr).eqns:
            name, values = eqn.primitive.name, [read(v) for v in eqn.invars]
            if name in _ARITHMETIC:
                outs = [_ARITHMETIC[name](*values, **eqn.params)]
            else:
                handler = getattr(self, f"_{name}", None)
                if handler is None:
                    raise NotImplementedError(f"a kernel with `{name}`: {eqn}")
                outs = yield from handler(thread, eqn, values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in _open(jaxpr).outvars]

    # One method for each primitive that is more than arithmetic.

    def _axis_index(self, thread, eqn, values):
        name = eqn.params["axis_name"]
        place = thread.places | self.program.place(thread.device)
        return [np.int32(place[name])]
        yield

    def _jit(self, thread, eqn, values):
        return (yield from self.run(thread, eqn.params["jaxpr"], values))

    _pjit = _closed_call = _jit

    def _while(self, thread, eqn, values):
        p = eqn.params
        a, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        cond_consts, body_consts, carry = values[:a], values[a:b], values[b:]
        while True:
            (go,) = yield from self.run(thread, p["cond_jaxpr"], [*cond_consts, *carry])
            if not go:
                return carry
            carry = yield from self.run(thread, p["body_jaxpr"], [*body_consts, *carry])

    def _cond(self, thread, eqn, values):
        branch = eqn.params["branches"][int(values[0])]
        return (yield from self.run(thread, branch, values[1:]))

    def _run_scoped(self, thread, eqn, values):
        jaxpr = eqn.params["jaxpr"]
        # Shared by the warpgroups of a block: all but the last axis tell blocks apart.
        assert tuple(eqn.params["collective_axes"]) == (self.thread_name,)
        site = (id(eqn), thread.runs_of[id(eqn)])
        thread.runs_of[id(eqn)] += 1
        block = tuple(v for k, v in thread.places.items() if k != self.thread_name)
        refs = []
        for i, var in enumerate(jaxpr.invars):
            assert "semaphore" in str(var.aval.dtype), var.aval
            positions = np.arange(math.prod(var.aval.shape)).reshape(var.aval.shape)
            key = (*site, i, block)
            refs.append(_SemaphoreRef(self.semaphores, key, thread.device, positions))
        return (yield from self.run(thread, jaxpr, [*values, *refs]))

    def _get_global(self, thread, eqn, values):
        what = eqn.params["what"]
        assert "semaphore" in str(what.dtype), what
        positions = np.arange(math.prod(what.shape)).reshape(what.shape)
        return [_SemaphoreRef(self.semaphores, (id(eqn),), thread.device, positions)]
        yield

    def _semaphore_signal(self, thread, eqn, values):
        tree = eqn.params["args_tree"]
        ref, transforms, count, device_id, _ = jax.tree.unflatten(tree, values)
        yield
        device = None
        if device_id is not None:
            device = self.find_device(thread.device, device_id)
        semaphore = ref.transform(transforms, self).get(device)
        semaphore.signals += [thread.clock.copy()] * int(count)
        thread.clock[thread.index] += 1
        return []

    def _semaphore_signal_multicast(self, thread, eqn, values):
        ref, transforms, count = jax.tree.unflatten(eqn.params["args_tree"], values)
        for device in range(self.program.num_devices):
            yield
            semaphore = ref.transform(transforms, self).get(device)
            semaphore.signals += [thread.clock.copy()] * int(count)
        thread.clock[thread.index] += 1
        return []

    def _semaphore_wait(self, thread, eqn, values):
        tree = eqn.params["args_tree"]
        ref, transforms, count, decrement = jax.tree.unflatten(tree, values)
        assert not decrement, "only counters that count up"
        yield ref.transform(transforms, self).get(), int(count)
        return []

    def _get(self, thread, eqn, values):
        yield
        ref = values[0].transform(
            jax.tree.unflatten(eqn.params["tree"], values[1:]), self
        )
        return [self._read(thread, ref)]

    def _swap(self, thread, eqn, values):
        yield
        ref = values[0].transform(
            jax.tree.unflatten(eqn.params["tree"], values[2:]), self
        )
        self._write(thread, ref.memory, ref.positions, values[1])
        return [None]  # Kernels store; nobody looks at what was there before.

    def _inline_mgpu_p(self, thread, eqn, values):
        """Code that jdp writes itself, by what it does."""
        fn = eqn.params["mgpu_fn"]
        if isinstance(fn, SignalAll):
            return (yield from self._signal_all(thread, eqn, values))
        assert fn.__name__ == "load_from_peer", eqn
        (ref, peer), leaves = values[:2], values[2:]
        transforms, _ = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], leaves)
        yield
        ref = ref.transform(transforms, self)
        return [self._read(thread, dataclasses.replace(ref, device=int(peer)))]

    _inline_mgpu = _inline_mgpu_p  # its name since JAX 0.12.

    def _signal_all(self, thread, eqn, values):
        """All lanes signal: each is a step, and all have the clock of the warpgroup."""
        fn = eqn.params["mgpu_fn"]
        ref, *first = values[: 1 + fn.is_remote]
        transforms, *_ = jax.tree.unflatten(
            eqn.params["pytree_ref_transforms"], values[1 + fn.is_remote :]
        )
        ref = ref.transform(transforms, self)
        clock = thread.clock.copy()
        thread.clock[thread.index] += 1
        for offset in fn.offsets:
            yield
            if fn.is_remote:
                semaphore = ref.get(int(first[0]) + offset)
            else:
                at = ref.positions.reshape(-1)[offset]
                semaphore = dataclasses.replace(ref, positions=at).get()
            semaphore.signals.append(clock)
        return []

    def _multimem_load_reduce(self, thread, eqn, values):
        assert eqn.params["reduction_op"] == "add"
        transforms = jax.tree.unflatten(eqn.params["tree"], values[1:])
        ref = values[0].transform(transforms, self)
        yield
        everyone = [
            self._read(thread, dataclasses.replace(ref, device=d))
            for d in range(self.program.num_devices)
        ]
        total = functools.reduce(operator.add, [v.astype(np.float32) for v in everyone])
        return [total.astype(everyone[0].dtype)]

    def _multimem_store(self, thread, eqn, values):
        transforms = jax.tree.unflatten(eqn.params["transforms_tree"], values[2:])
        ref = values[1].transform(transforms, self)
        for memory in ref.memories:
            yield
            self._write(thread, memory, ref.positions, values[0])
        return []

    def _layout_cast(self, thread, eqn, values):
        return values
        yield

    _multiple_of = _layout_cast

    # Accesses

    def _read(self, thread, ref):
        memory, at = ref.memory, ref.positions
        self._check_writes(thread, memory, at, "reads")
        memory.read_times[thread.index, at] = thread.clock[thread.index]
        return memory.values[at]

    def _write(self, thread, memory, at, values):
        self._note_write(thread, memory, at)
        assert np.asarray(values).dtype == memory.values.dtype
        memory.values[at] = values

    def _note_write(self, thread, memory, at):
        self._check_writes(thread, memory, at, "writes")
        late = memory.read_times[:, at] > thread.clock.reshape(-1, *[1] * at.ndim)
        late[thread.index] = False
        if late.any():
            reader = int(np.argwhere(late)[0][0])
            self._report(thread, "writes", memory, f"thread {reader} reads")
        memory.writer[at] = thread.index
        memory.write_time[at] = thread.clock[thread.index]

    def _check_writes(self, thread, memory, at, what):
        writer = memory.writer[at]
        late = (memory.write_time[at] > thread.clock[writer]) & (writer != thread.index)
        if late.any():
            who = int(np.asarray(writer)[late].reshape(-1)[0])
            self._report(thread, what, memory, f"thread {who} writes")

    def _report(self, thread, what, memory, other):
        self.program.races.append(
            f"{thread.name} {what} {memory.name} of device {memory.device}, {other} it"
        )


def _convert(x, *, new_dtype, **_):
    return np.asarray(x).astype(new_dtype)


def _select(which, *cases, **_):
    return np.choose(np.asarray(which).astype(np.int32), cases)


def _broadcast(x, *, shape, broadcast_dimensions, **_):
    assert np.ndim(x) == 0 and broadcast_dimensions == ()
    return np.broadcast_to(x, shape)


def _like_c(fn):
    """Integer division and remainder round towards zero, as in C."""
    return lambda a, b, **_: np.asarray(fn(float(a) / float(b), a, b)).astype(np.int32)


def _ignoring(fn):
    return lambda *args, **_: fn(*args)


_ARITHMETIC: dict[str, Any] = {
    "add": _ignoring(np.add),
    "sub": _ignoring(np.subtract),
    "mul": _ignoring(np.multiply),
    "max": _ignoring(np.maximum),
    "min": _ignoring(np.minimum),
    "div": _like_c(lambda q, a, b: math.trunc(q)),
    "rem": _like_c(lambda q, a, b: math.fmod(a, b)),
    "lt": _ignoring(np.less),
    "le": _ignoring(np.less_equal),
    "gt": _ignoring(np.greater),
    "ge": _ignoring(np.greater_equal),
    "eq": _ignoring(np.equal),
    "ne": _ignoring(np.not_equal),
    "and": _ignoring(np.logical_and),
    "or": _ignoring(np.logical_or),
    "not": _ignoring(np.logical_not),
    "convert_element_type": _convert,
    "select_n": _select,
    "broadcast_in_dim": _broadcast,
}
