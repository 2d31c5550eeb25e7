"""Cluster: which processes form the job, and which devices are its replicas?"""

import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.backend

from jdp import compat, types
from jdp.collectives import auto
from jdp.replicas import agreement, stamps, virtual_replicas, world_end
from jdp.replicas import mesh as worlds
from jdp.replicas.mesh import World
from jdp.runtime import (
    addresses,
    coordination,
    descriptors,
    environment,
    freed_memory,
    job_key,
    own_watch,
    places,
    program_end,
    roll_call,
    roll_call_sockets,
    sigterm,
    user_mesh,
    user_program,
)
from jdp.runtime.lifeline import lifeline
from jdp.runtime.places import PlaceOptions, ProcessPlace
from jdp.runtime.store import DistributedStore
from jdp.runtime.user_mesh import MeshOption
from jdp.types import AxisName, Device
from jdp.watch import recording
from jdp.watch.job_watch import OnStall, WatchOptions

_logger = logging.getLogger("jdp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _InitOptions(PlaceOptions):
    num_cpu_devices: int | None
    axis_name: AxisName
    num_nodes: int | None
    mesh: MeshOption
    manual_axes: tuple[str, ...]
    num_shards: int | None
    stall_s: float
    on_stall: OnStall


class _Initialized:
    """Arguments of the last call of `init`; a process is in one job at a time."""

    options: _InitOptions | None = None
    has_left: bool = False  # whether `jdp.shutdown` has ended an earlier world.
    # GPUs and number of CPU devices that this process was configured for.
    devices: tuple[str | None, int | None] | None = None
    config_before: dict[str, Any] = {}  # options of JAX, by name.


def init(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    num_cpu_devices: int | None = None,
    axis_name: AxisName = "data",
    num_nodes: int | None = None,
    timeout_s: float = 300.0,
    mesh: MeshOption = None,
    manual_axes: str | Sequence[str] = (),
    num_shards: int | None = None,
    stall_s: float = 10.0,
    on_stall: OnStall = "log",
) -> World:
    """Joins the job and returns its replicas; every process calls it once, first.

    Without arguments the place of this process comes from `jdp launch`, otherwise from
    what `jax.distributed` detects (Slurm, Open MPI, Kubernetes, TPU). If neither gives
    a place, this process is alone and its devices are the replicas, as with
    `num_processes=1` and nothing else. A second call with the same arguments returns
    the same world.

    Args:
      coordinator_address: "host:port" at which process 0 listens; needs `num_processes`
        and `process_id`.
      num_processes: number of processes of the job.
      process_id: index of this process, from 0.
      local_device_ids: ids of the GPUs that this process uses; None: all it sees.
      num_cpu_devices: number of devices into which the CPU is divided; None: 1.
      axis_name: name of the mesh axis along which the replicas lie, or a pair of names:
        across nodes (hosts) and within a node.
      num_nodes: with a pair of names, the number of nodes; None: the number of hosts.
      timeout_s: longest wait for other processes, here and later on the host, in
        seconds.
      mesh: a mesh with the axis `axis_name`, and maybe model axes beside it; or a
        function without arguments that makes it, which several processes need, since
        they have each other's devices only once they have met. None: a mesh of all
        devices, without model axes. The axes of `World.mesh` are of type Auto.
      manual_axes: the model axes along which steps communicate themselves, as under
        `jax.shard_map`, so that they see the part of an array that a device has. Along
        the others JAX partitions the step, as under `jax.jit`, and it sees whole
        arrays.
      num_shards: number of shards that each global batch is cut into, a multiple of the
        number of replicas. Steps compute them one by one, and the training has the
        same bits on any number of replicas; see `jdp.data_parallel`. None: each replica
        computes its part of a batch at once.
      stall_s: in a job without `jdp launch`, a process for which others wait so many
        seconds longer than a usual step, but at least 5, is named on all of them; 0:
        never. Under `jdp launch` its own option counts; see docs/when_it_hangs.md.
      on_stall: "log": it is only named. "raise": the processes also end, with exit code
        79, once the others have waited thirty times `stall_s`.

    Returns:
      The world; functions that take `world=None` use it.

    Raises:
      ValueError: an argument is out of range or missing, or the environment tells that
        there are several processes but not where they meet.
      RuntimeError: called before with other arguments, or after JAX has chosen its
        devices; the coordinator cannot be reached, its port is taken, or processes are
        missing, doubled or do not fit.
    """
    options = _InitOptions(
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=None if local_device_ids is None else tuple(local_device_ids),
        num_cpu_devices=num_cpu_devices,
        axis_name=axis_name if isinstance(axis_name, str) else tuple(axis_name),
        num_nodes=num_nodes,
        timeout_s=timeout_s,
        mesh=mesh,
        manual_axes=(manual_axes,) if isinstance(manual_axes, str) else (*manual_axes,),
        num_shards=num_shards,
        stall_s=stall_s,
        on_stall=on_stall,
    )
    if _Initialized.options is not None:
        _check_same_options(_Initialized.options, options)
        return worlds.current_world()
    return _begin(options)


def _begin(options: _InitOptions) -> World:
    """Joins the job, for the first time or after `jdp.shutdown`."""
    _check_options(options)
    user_program.report(user_program.BEGAN)
    platforms = jax.config.values["jax_platforms"] or ""
    if not environment.has_accelerator({**os.environ, "JAX_PLATFORMS": platforms}):
        freed_memory.keep()
    place = places.find(options, os.environ)
    if place is not None and place.num_processes > 1:
        world, is_one_host = _join_job(place, options)
    else:
        _choose_devices(place, options)
        world, is_one_host = _make_world(options, None), True
    if options.mesh is not None:
        world = _with_mesh(world, options)
    if options.num_shards is not None:
        world = virtual_replicas.with_shards(world, options.num_shards)
    worlds.set_current_world(world)
    _Initialized.options = options
    auto.prepare(world, is_one_host=is_one_host)
    user_program.report(user_program.JOINED)
    return world


def forget() -> None:
    """Allows the next call of `init`, also with other arguments."""
    _Initialized.options, _Initialized.has_left = None, True
    world_end.end()


def _check_same_options(before: _InitOptions, now: _InitOptions) -> None:
    for field in dataclasses.fields(now):
        old, new = getattr(before, field.name), getattr(now, field.name)
        if field.name == "mesh" and user_mesh.is_made_by(new, worlds.current_world()):
            continue
        if old != new:
            raise RuntimeError(
                f"`jdp.init` was called before with `{field.name}={old!r}`, now with "
                f"{new!r}. A process is in one job at a time: keep the world it "
                "returned, or call `jdp.shutdown()` first, on all processes."
            )


def _check_options(options: _InitOptions) -> None:
    types.check_axis_name(options.axis_name)
    user_mesh.check_options(
        options.mesh, options.axis_name, options.manual_axes, options.num_nodes
    )
    if options.timeout_s <= 0:
        raise ValueError(f"`timeout_s` must be positive, got {options.timeout_s}.")
    for name in ("num_cpu_devices", "num_nodes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    environment.check_num_devices("num_cpu_devices", options.num_cpu_devices)
    WatchOptions(stall_s=options.stall_s, on_stall=options.on_stall)
    num_names = len(types.as_axis_names(options.axis_name))
    if options.num_nodes is not None and num_names < 2:
        raise ValueError(
            "`num_nodes` needs a pair of axis names, such as "
            f"`axis_name=('node', 'data')`; got {options.axis_name!r}."
        )


def _join_job(place: ProcessPlace, options: _InitOptions) -> tuple[World, bool]:
    """Joins a job of several processes; also returns whether all are on one host."""
    user_mesh.check_comes_in_time(options.mesh, place.num_processes)
    has_launcher = user_program.has_launcher()
    recording.begin(os.environ.pop(environment.RECORD, ""))
    if not has_launcher:
        own_watch.begin_record(place.process_id)
    with stamps.during(stamps.INIT_BEGUN, 1):
        world, is_one_host = _meet_others(place, options)
    if not has_launcher:
        limits: Any = dict(stall_s=options.stall_s, on_stall=options.on_stall)
        own_watch.start(world, **limits)
    return world, is_one_host


def _meet_others(place: ProcessPlace, options: _InitOptions) -> tuple[World, bool]:
    is_host = place.is_one_launch and place.process_id == 0
    with coordination.make_path(is_one_launch=is_host) as path:
        meeting = _join(place, options, path)
        # A collective of all processes: after it, all are connected.
        world = _make_world(options, meeting)
    # Process 0 has removed it, unless it was killed meanwhile.
    coordination.remove(meeting.path)
    os.environ[environment.JOINED] = str(os.getpid())
    lifeline.start(world, meeting.session_key)
    return world, len(set(meeting.nodes)) == 1


def _join(place: ProcessPlace, options: _InitOptions, path: str) -> roll_call.Meeting:
    """Runs the roll call, and starts `jax.distributed`."""
    if compat.backend_is_initialized() and not _begin_anew():
        raise RuntimeError(
            "`jdp.init` must come before anything that makes JAX choose its devices, "
            "such as `jax.devices()`, `jnp.zeros(...)` or a random key, because the "
            f"{place.num_processes} processes of this job share theirs."
        )
    descriptors.raise_limit()
    hello = roll_call.make_hello(place.process_id, place.num_processes, node=place.node)
    address = place.coordinator_address
    key = job_key.from_environ(os.environ)
    meeting = roll_call_sockets.call_roll(
        hello, address, timeout_s=options.timeout_s, key=key, path=path
    )
    is_outside = not addresses.is_loopback(meeting.host)
    if key is None and is_outside and place.process_id == 0:
        _logger.warning(
            "This job spans hosts and has no key: whatever reaches its ports may take "
            "the place of a process. Give all processes the same `%s`, or `jdp launch` "
            "a `--key-file`; see docs/security.md.",
            job_key.VARIABLE,
        )
    _choose_devices(place, options)
    with sigterm.kept():
        coordination.start(
            place.process_id, place.num_processes, address, meeting, options.timeout_s
        )
    # Otherwise it offers the address of the host's own name: 127.0.1.1 on Debian.
    compat.offer_gloo_address(meeting.own_host)
    if not user_program.has_launcher():  # A launcher ends the job when a process fails.
        program_end.prepare()
    return meeting


def _make_world(options: _InitOptions, meeting: roll_call.Meeting | None) -> World:
    _find_devices()
    process_count = jax.process_count()
    nodes, store = [""], None
    if process_count > 1:
        if meeting is None:
            raise RuntimeError(
                f"`jax.distributed` was started with {process_count} processes before "
                "`jdp.init`, which has to start it. Leave that call out."
            )
        nodes = meeting.nodes
        store = DistributedStore(compat.distributed_client(), meeting.session_key)
    # Devices of a process are adjacent, and so are processes of a machine.
    rank_of_node = {node: rank for rank, node in enumerate(dict.fromkeys(nodes))}

    def position(device: Device) -> tuple[int, int, int]:
        process = device.process_index
        node = rank_of_node[nodes[process]] if process_count > 1 else 0
        return node, process, device.id

    devices = sorted(jax.devices(), key=position)
    # The user's mesh takes its place; see `_with_mesh`.
    axis_name = options.axis_name if options.mesh is None else "data"
    num_nodes = options.num_nodes or len(rank_of_node)
    return World(
        mesh=worlds.make_mesh(devices, axis_name, num_nodes=num_nodes),
        axis_name=axis_name,
        process_index=jax.process_index(),
        process_count=process_count,
        timeout_s=options.timeout_s,
        store=store,
        host=meeting.host if meeting else "127.0.0.1",
        num_nodes=len(rank_of_node),
    )


def _find_devices() -> None:
    """Lets JAX find its devices; an error says which GPUs it was to find."""
    try:
        jax.devices()
    except RuntimeError as error:
        device_ids = _Initialized.devices[0] if _Initialized.devices else None
        # Another error may come from the end of another process.
        if device_ids is None or "no supported devices found" not in str(error):
            raise
        raise RuntimeError(
            f"JAX finds no device on this host with the id {device_ids}. If a host has "
            "several processes, each takes the GPU of its own number: start no more "
            "of them than the host has GPUs (`jdp launch -n`), or pass "
            f"`local_device_ids`. JAX says: {error}"
        ) from None


def _with_mesh(world: World, options: _InitOptions) -> World:
    """Returns a world with the mesh of the user; every process calls it."""
    assert options.mesh is not None
    with agreement.reporting(world, user_mesh.TOPIC):
        given = options.mesh, options.axis_name, options.manual_axes
        found = user_mesh.make(*given)
    with_mesh = dataclasses.replace(
        world,
        mesh=found,
        axis_name=options.axis_name,
        manual_axes=tuple(n for n in found.axis_names if n in options.manual_axes),
        is_plain=user_mesh.is_plain(found, world, options.axis_name),
    )
    user_mesh.compare(with_mesh)
    return with_mesh


def _configure(name: str, value: Any) -> None:
    """Sets an option of JAX; None: as it was before `init` has set it."""
    before = _Initialized.config_before
    if value is not None:
        before.setdefault(name, jax.config.values[name])
    if name in before:
        jax.config.update(name, before[name] if value is None else value)


def _begin_anew() -> bool:
    """Lets JAX choose its devices once more, after `jdp.shutdown`; returns whether."""
    if _Initialized.has_left:
        jax.extend.backend.clear_backends()
    return _Initialized.has_left


def _choose_devices(place: ProcessPlace | None, options: _InitOptions) -> None:
    """Configures the devices of this process before JAX looks for them."""
    device_ids = place.local_device_ids if place else options.local_device_ids
    count = options.num_cpu_devices or (place.num_cpu_devices if place else None)
    wanted = None if device_ids is None else ",".join(map(str, device_ids)), count
    if compat.backend_is_initialized() and wanted != _Initialized.devices:
        _begin_anew()
    if not compat.backend_is_initialized():
        _configure("jax_cuda_visible_devices", wanted[0])
        _configure("jax_rocm_visible_devices", wanted[0])
        _configure("jax_num_cpu_devices", count)
        _Initialized.devices = wanted
        return
    if wanted == _Initialized.devices:
        return
    if device_ids is not None:
        raise RuntimeError(
            "`local_device_ids` comes too late: JAX has already chosen its devices. "
            "Call `jdp.init` before anything that uses a device."
        )
    is_cpu = jax.default_backend() == "cpu"
    if count is not None and is_cpu and jax.local_device_count() != count:
        raise RuntimeError(
            f"`num_cpu_devices={count}` comes too late: JAX has already made "
            f"{jax.local_device_count()}. Call `jdp.init` before anything that uses "
            "a device."
        )
