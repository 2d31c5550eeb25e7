"""Jobs of servers and workers that are threads of one process."""

import contextlib
import socket
import threading
import time

from jdp import parameter_server


def free_addresses(num):
    with contextlib.ExitStack() as stack:
        probes = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(num)
        ]
        return tuple(f"127.0.0.1:{p.getsockname()[1]}" for p in probes)


class ThreadJob:
    """Servers in threads; workers are made in the thread that wants them."""

    def __init__(
        self, folder, params, tx, *, num_servers=1, num_workers=None, **kwargs
    ):
        self.params, self.num_workers = params, num_workers
        self.addresses = free_addresses(num_servers)
        self.key_file = str(folder / "keys")
        self.errors = []
        self.tx, self.kwargs = tx, kwargs
        with contextlib.suppress(FileExistsError):
            parameter_server.make_keys(self.key_file)
        self.servers, self.threads = [], []

    def place(self, role, index):
        return parameter_server.Place(
            role=role,
            index=index,
            addresses=self.addresses,
            num_workers=self.num_workers,
            key_file=self.key_file,
        )

    def start(self, index):
        server = parameter_server.Server(
            self.params, self.tx, place=self.place("server", index), **self.kwargs
        )

        def run():
            try:
                server.serve()
            except Exception as error:
                self.errors.append(error)

        thread = threading.Thread(target=run, name=f"server {index}", daemon=True)
        thread.start()
        self.servers.append(server)
        self.threads.append(thread)
        return server

    def worker(self, index=0, params=None, **options):
        options = {"timeout_s": 10.0, **options}
        return parameter_server.Worker(
            self.params if params is None else params,
            place=self.place("worker", index),
            options=parameter_server.WorkerOptions(**options),
        )

    def __enter__(self):
        for index in range(len(self.addresses)):
            self.start(index)
        return self

    def __exit__(self, *error):
        for server in self.servers:
            server.stop()
        for thread in self.threads:
            thread.join(10.0)
            assert not thread.is_alive(), f"{thread.name} hangs"


def run_workers(job, fn, num_workers, **options):
    """Runs `fn(worker, index)` in threads; returns what each returned."""
    results = [None] * num_workers

    def run(index):
        try:
            with job.worker(index, **options) as worker:
                results[index] = fn(worker, index)
        except Exception as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(i,), name=f"worker {i}", daemon=True)
        for i in range(num_workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), f"{thread.name} hangs"
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def wait_for(condition, timeout_s=10.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)
