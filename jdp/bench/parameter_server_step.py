"""Processes of `jdp bench parameter-server`: what do they time?"""

import functools
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import zmq

import jdp
from jdp import parameter_server
from jdp.bench import channel, jax_step
from jdp.bench import parameter_server as bench
from jdp.bench.channel import StepConfig
from jdp.parameter_server import Place, Worker

_SLOWDOWN = 5  # of the last worker.
_THROUGHPUT_S = 1.5


def make_all_reduce_step(world: jdp.World, config: StepConfig) -> Callable[[], None]:
    """Returns one call of the step in which gloo averages the gradients."""
    step = jax_step.make_steps(world, config)["jdp"]
    batch = jdp.global_batch(world, jax_step.make_batch(config, world.process_index))
    state = [jdp.replicate(world, jax_step.init_params(config))]

    def once() -> None:
        state[0], loss = step(state[0], batch)
        jax.block_until_ready((state[0], loss))

    return once


def make_variants(
    worker: Worker, config: StepConfig, index: int, echo_port: int
) -> dict[str, channel.RunSteps]:
    """Returns what a worker does, by variant; the other worker does it too."""
    grad_fn = jax.jit(jax.value_and_grad(jax_step.loss_fn))
    batch = jax_step.make_batch(config, index)
    state = [worker.pull()]
    _, grads = jax.block_until_ready(grad_fn(state[0], batch))
    is_sync = worker.mode.startswith("sync")

    def step() -> None:
        _, found = grad_fn(state[0], batch)
        worker.push(found)
        state[0] = jax.block_until_ready(worker.pull())

    def exchange() -> None:
        worker.push(grads)
        jax.block_until_ready(worker.pull())

    step()
    slow = functools.partial(_run_slowed, worker, grad_fn, batch, index)
    if is_sync:
        return {
            bench.SYNC_STEP: lambda n: channel.time_steps(step, n),
            bench.SYNC_SLOW: lambda n: slow(num_steps=max(3, n // 4)),
        }
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(grads))
    raw = _make_raw_exchange(index, echo_port, num_bytes)
    return {
        # By one worker; the other one leaves it the machine.
        bench.EXCHANGE: lambda n: [0.0] if index else channel.time_steps(exchange, n),
        bench.RAW: lambda n: [0.0] if index else channel.time_steps(raw, n),
        bench.ASYNC_SLOW: lambda n: slow(num_steps=None),
    }


def _run_slowed(
    worker: Worker, grad_fn: Any, batch: Any, index: int, *, num_steps: int | None
) -> list[float]:
    """Trains with the last worker slowed; returns seconds an update of the servers.

    For so many steps of each worker, or, where none waits for another, for a while.
    """
    params = worker.pull()
    start_s, before = time.perf_counter(), worker.version[1]
    done = 0
    while True:
        begin_s = time.perf_counter()
        if num_steps is None:
            worker.prefetch()
        _, grads = jax.block_until_ready(grad_fn(params, batch))
        if index == 1:
            time.sleep((_SLOWDOWN - 1) * (time.perf_counter() - begin_s))
        worker.push(grads)
        params = worker.pull()
        done += 1
        elapsed_s = time.perf_counter() - start_s
        if done == num_steps or (num_steps is None and elapsed_s > _THROUGHPUT_S):
            break
    worker.flush()
    worker.pull()
    elapsed_s = time.perf_counter() - start_s
    return [elapsed_s / max(1, worker.version[1] - before)]


def _make_raw_exchange(index: int, port: int, num_bytes: int) -> Callable[[], None]:
    """Returns a round trip of one frame to the other worker, which has a socket alone.

    Over loopback, with nothing encrypted, computed or copied beside what ZeroMQ does.
    """
    context = zmq.Context.instance()
    address = f"tcp://127.0.0.1:{port}"
    if index == 1:
        socket = context.socket(zmq.PAIR)
        socket.bind(address)

        def echo() -> None:
            while True:
                socket.send(socket.recv(copy=False), copy=False)

        threading.Thread(target=echo, name="echo", daemon=True).start()
        return lambda: None
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    frame = np.ones(num_bytes, np.uint8)
    received = np.empty(num_bytes, np.uint8)

    def once() -> None:
        socket.send(frame, copy=False)
        received[:] = np.frombuffer(socket.recv(copy=False).buffer, np.uint8)

    return once


def main(port: int, config: StepConfig, mode: str, echo_port: int) -> None:
    """Runs one process."""
    if mode == "gloo":
        world = jdp.init()
        once = make_all_reduce_step(world, config)
        once()
        variants = {bench.ALL_REDUCE_STEP: functools.partial(channel.time_steps, once)}
        channel.serve(port, "gloo", world.process_index, variants)
        return
    place = Place.from_environ()
    params = jax_step.init_params(config)
    if place.role == "server":
        kind = (
            parameter_server.sync if mode == "sync" else parameter_server.asynchronous
        )
        tx = optax.sgd(config.learning_rate)
        parameter_server.Server(params, tx, mode=kind()).serve()
        return
    with Worker(params) as worker:
        variants = make_variants(worker, config, place.index, echo_port)
        channel.serve(port, mode, place.index, variants)


def _load_digits(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns images, shape (n, 64), float32, and labels (n,), in random order."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    order = rng.permutation(len(digits.target))
    return (digits.data[order] / 16).astype(np.float32), digits.target[order]


def _logits_of(params: Any, x: Any) -> jax.Array:
    hidden = jax.numpy.tanh(x @ params["w0"] + params["b0"])
    return hidden @ params["w1"] + params["b1"]


def _loss_fn(params: Any, batch: Any) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(_logits_of(params, batch[0]), batch[1]).mean()


def train_digits(mode: Any, folder: str, port: int, seed: int) -> float:
    """Returns the accuracy of two workers and a server, threads of this process."""
    rng = np.random.default_rng(seed)
    images, labels = _load_digits(rng)
    sizes = {"w0": (64, 32), "b0": (32,), "w1": (32, 10), "b1": (10,)}
    params = {k: 0.2 * rng.normal(size=s).astype("f4") for k, s in sizes.items()}
    key_file = f"{folder}/keys-{port}"
    parameter_server.make_keys(key_file)

    def place(role: Any, index: int) -> Place:
        return Place(
            role=role,
            index=index,
            addresses=(f"127.0.0.1:{port}",),
            num_workers=2,
            key_file=key_file,
        )

    server = parameter_server.Server(
        params, optax.adam(5e-3), mode=mode, place=place("server", 0)
    )
    found: list[Any] = [None, None]

    def work(index: int) -> None:
        orders = np.random.default_rng(10 * seed + index)
        own = np.arange(index, 1500, 2)
        chosen = [orders.permutation(own)[: 46 * 16].reshape(-1, 16) for _ in range(8)]
        batches = [(images[i], labels[i]) for i in np.concatenate(chosen)]
        with Worker(params, place=place("worker", index)) as worker:
            for _ in worker.steps(jax.jit(jax.value_and_grad(_loss_fn)), batches):
                pass
            worker.flush()
            found[index] = worker.pull()

    threads = [threading.Thread(target=server.serve, name="server")]
    threads += [threading.Thread(target=work, args=(i,), name=f"w{i}") for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    right = _logits_of(found[0], images[1500:]).argmax(-1) == labels[1500:]
    return float(right.mean())


def measure_accuracy(folder: str, find_port: Callable[[], int], num_seeds: int) -> dict:
    """Returns the mean accuracy by mode, in percent, over seeds."""
    modes = {
        "sync": parameter_server.sync(),
        "async": parameter_server.asynchronous(),
        "bounded(4)": parameter_server.bounded(staleness=4),
    }
    return {
        name: 100
        * statistics.mean(
            train_digits(mode, folder, find_port(), seed) for seed in range(num_seeds)
        )
        for name, mode in modes.items()
    }


if __name__ == "__main__":
    driver_port, num_blocks, width, batch_size, own_port = map(int, sys.argv[1:6])
    size = StepConfig(num_blocks, width, batch_size)
    main(driver_port, size, sys.argv[6], own_port)
