"""Flight records of ranks that run the same operations, as the engine keeps them."""

import pathlib
import tempfile
import time

from jdp.eager.diagnosis import flight_recorder
from jdp.eager.diagnosis.flight_recorder import FlightRecorder, Record


def all_reduce(name, **changes):
    fields = {"kind": "all_reduce", "dtype": "float32", "shape": (4, 2), "op": "sum"}
    return Record(name, **{**fields, **changes})


class Rank:
    """A process that submits operations, and runs what it is told."""

    def __init__(self, rank, *, size=2, capacity=2000):
        self.recorder = FlightRecorder(rank=rank, size=size, capacity=capacity)
        self.now_s = time.perf_counter() - 1000.0
        self.waiting = {}

    def submit(self, record):
        self.now_s += 0.001
        record.submitted_s = self.now_s
        self.waiting[record.name] = record
        self.recorder.add(record)
        return record

    def run(self, name, order, error=""):
        self.now_s += 0.001
        record = self.waiting.pop(name)
        record.agreed_s = record.started_s = self.now_s
        record.finished_s = self.now_s + 0.0005
        record.order, record.error = order, error
        return record

    def dump(self, path=None, reason="asked to"):
        if path is not None:
            self.recorder.dump(path, reason)
            return flight_recorder.read_dump(path)
        with tempfile.TemporaryDirectory() as folder:
            return self.dump(pathlib.Path(folder) / "dump.json", reason)


def train(ranks, names, num_steps, *, first_order=0):
    """Runs steps of the same names on all ranks; returns the next position."""
    order = first_order
    for _ in range(num_steps):
        for rank in ranks:
            for name in names:
                rank.submit(all_reduce(name))
        for name in names:
            for rank in ranks:
                rank.run(name, order)
            order += 1
    return order
