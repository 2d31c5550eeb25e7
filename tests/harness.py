"""Harness: real processes, scripted faults, worlds in one process, the oracle."""

import functools
import importlib
import math
import os
import pathlib
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax._src import source_info_util

import jdp
from jdp.collectives.host import ordered
from jdp.compat import origins
from jdp.launch import launch
from jdp.replicas import mesh
from jdp.runtime.store import make_memory_stores

ROOT = pathlib.Path(__file__).parent.parent
REFERENCE = pathlib.Path(__file__).parent / "reference"


def python_path():
    """Returns a PYTHONPATH for a process: jdp before what this one was given."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(ROOT), *([given] if given else [])])


def as_body(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function for `shard_map` that is all that its program consists of."""

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        with ordered.tracing_body():
            return fn(*args)

    return run


class Outcome(NamedTuple):
    """What became of a job."""

    exit_code: int
    output: str  # stdout and stderr of all processes, as the launcher showed them.
    values: list[Any]  # what `fn` returned, by process; None where it did not.
    seconds: float


@functools.cache
def fast_options() -> dict[str, bool | int]:
    """Options with which jaxlib 0.10 compiles a program in a third of the time.

    Its collectives stay what they are; what is between them becomes simpler machine
    code. Not every XLA has all the options: jaxlib 0.12 has no other emitters, and
    takes two thirds of the time. Asking needs the backend: not before `jdp.init`.
    Where `compile_fast_environ` has set them for the whole process, none is left.
    """
    options = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }

    if f"--{next(iter(options))}=0" in os.environ.get("XLA_FLAGS", "").split():
        return {}  # To ask takes a tenth of the start of a process.

    def is_known(name: str) -> bool:
        try:
            jax.jit(lambda: 0, compiler_options={name: options[name]})()
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            return False
        return True

    return {name: value for name, value in options.items() if is_known(name)}


def jit_fast(fn: Callable[..., Any], **kwargs: Any) -> Any:
    """`jax.jit` for a program of which only the results are of interest."""
    return jax.jit(fn, compiler_options=fast_options(), **kwargs)


def compile_fast_environ() -> dict[str, str]:
    """The environment of this process, and that new ones compile as `jit_fast`."""
    flags = [f"--{name}={str(value).lower()}" for name, value in fast_options().items()]
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
    return {**os.environ, "XLA_FLAGS": flags.strip()}


def run_processes(
    fn: Callable[..., Any],
    num_processes: int,
    *args: Any,
    devices_per_process: int | None = None,
    grace_s: float = 1.0,
    ends_as_usual: bool = False,
) -> Outcome:
    """Runs `fn(*args)` in real processes, started by `jdp launch`.

    `fn` is a function of a test module. It calls `jdp.init` itself. For tests of what
    becomes of threads and objects when the interpreter ends, `ends_as_usual`.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        pathlib.Path(folder, "args").write_bytes(pickle.dumps(args))
        command = launch.Command(
            kind="module",
            target="tests.process",
            arguments=(fn.__module__, fn.__qualname__, folder),
        )
        options = launch.LaunchOptions(
            num_processes=num_processes,
            devices_per_process=devices_per_process,
            grace_s=grace_s,
            has_shares=False,  # Tests run beside each other.
        )
        environ = {**compile_fast_environ(), "PYTHONPATH": python_path()}
        if ends_as_usual:
            environ["TESTS_END_AS_USUAL"] = "1"
        start_s = time.monotonic()
        exit_code = launch.launch(
            command,
            options,
            environ=environ,
            stdout_fd=log.fileno(),
            stderr_fd=log.fileno(),
        )
        seconds = time.monotonic() - start_s
        log.seek(0)
        output = log.read().decode()
        files = [pathlib.Path(folder, str(p)) for p in range(num_processes)]
        values = [pickle.loads(f.read_bytes()) if f.exists() else None for f in files]
    return Outcome(exit_code, output, values, seconds)


def run_checked(fn: Callable[..., Any], num_processes: int, *args: Any, **kwargs: Any):
    """`run_processes` of a job that must end well; returns the values."""
    outcome = run_processes(fn, num_processes, *args, **kwargs)
    assert outcome.exit_code == 0, outcome.output
    return outcome.values


def main() -> None:
    """Runs one process of `run_processes`."""
    module, name, folder = sys.argv[1:]
    args = pickle.loads(pathlib.Path(folder, "args").read_bytes())
    value = getattr(importlib.import_module(module), name)(*args)
    path = pathlib.Path(folder, os.environ["JDP_PROCESS_ID"])
    path.write_bytes(pickle.dumps(value))


def die(process: int) -> None:
    """A scripted fault: process `process` ends as if the machine had taken it."""
    if jax.process_index() == process:
        os.kill(os.getpid(), signal.SIGKILL)


def local_world(num_replicas: int, axis_name: Any = "data", num_nodes: int = 1):
    """A world of some of this process' devices."""
    devices = jax.devices()[:num_replicas]
    return mesh.World(
        mesh=mesh.make_mesh(devices, axis_name, num_nodes=num_nodes),
        axis_name=axis_name,
        process_index=0,
        process_count=1,
        timeout_s=10.0,
        store=None,
    )


def mesh_world(
    shape: tuple[int, ...],
    axes: tuple[str, ...] = ("data", "model"),
    *,
    axis_name: Any = "data",
    manual: tuple[str, ...] = (),
):
    """A world with a mesh of the user's, of some of this process' devices."""
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return mesh.World(
        mesh=jax.sharding.Mesh(devices, axes),
        axis_name=axis_name,
        process_index=0,
        process_count=1,
        timeout_s=10.0,
        store=None,
        manual_axes=manual,
        is_plain=False,
    )


def run_threads(
    fn: Callable[[jdp.World], Any],
    num_processes: int,
    *,
    timeout_s: float = 5.0,
    join_timeout_s: float = 60.0,
):
    """Runs `fn(world)` once a thread, on worlds that share an in-memory store.

    Returns:
      What each returned, or the exception that it raised.
    """
    results: list[Any] = [None] * num_processes
    stores = make_memory_stores(num_processes)

    def run(index: int) -> None:
        world = mesh.World(
            mesh=mesh.make_mesh(jax.devices()[:1], "data", num_nodes=1),
            axis_name="data",
            process_index=index,
            process_count=num_processes,
            timeout_s=timeout_s,
            store=stores[index],
        )
        try:
            results[index] = fn(world)
        except Exception as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(i,), name=f"process {i}", daemon=True)
        for i in range(num_processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=join_timeout_s)
        assert not thread.is_alive(), f"{thread.name} hangs"
    return results


def error_text(fn: Callable[[], Any]) -> tuple[str, float]:
    """Calls `fn`, which must raise; returns the exception as text, and the seconds."""
    start_s = time.monotonic()
    try:
        fn()
    except Exception as error:
        text = "".join(traceback.format_exception_only(error))
        return text, time.monotonic() - start_s
    return "", time.monotonic() - start_s


# The oracle: a small network whose gradients all have the same order of magnitude.


def drop_tracebacks(monkeypatch: Any) -> None:
    """For a test: equations are made without tracebacks."""
    nothing = types.SimpleNamespace(get_traceback=lambda: None)
    client = types.SimpleNamespace(Traceback=nothing)
    monkeypatch.setattr(source_info_util, "xla_client", client)
    (eqn,) = jax.make_jaxpr(lax.sin)(1.0).eqns
    assert origins.frames_of(eqn) == []


def oracle_params(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"w0": (5, 16), "b0": (16,), "w1": (16, 3), "b1": (3,)}
    return {k: rng.normal(size=s).astype(dtype) * dtype(0.3) for k, s in shapes.items()}


def oracle_batches(num_steps: int, batch_size: int = 16, dtype: Any = np.float32):
    rng = np.random.default_rng(1)
    return [
        {
            "x": rng.normal(size=(batch_size, 5)).astype(dtype),
            "y": rng.normal(size=(batch_size, 3)).astype(dtype),
        }
        for _ in range(num_steps)
    ]


def oracle_loss(params: Any, batch: Any) -> jax.Array:
    h = jax.numpy.tanh(batch["x"] @ params["w0"] + params["b0"])
    return ((h @ params["w1"] + params["b1"] - batch["y"]) ** 2).mean()


def torch_loss(params: Any, batch: Any) -> jax.Array:
    """Of the network of the reference numbers, weights in the layout of torch."""
    x, y = batch
    for w, b in params[:-1]:
        x = jax.numpy.tanh(x @ w.T + b)
    w, b = params[-1]
    return jax.numpy.mean((x @ w.T + b - y) ** 2)


def train_alone(params: Any, batches: list, tx: Any) -> tuple[Any, list[float]]:
    """One device, whole batches: what n replicas on shards must reproduce."""
    state = tx.init(params)
    losses = []

    @jit_fast
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(oracle_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(lambda p, u: p + u, params, updates), state, loss

    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return params, losses
