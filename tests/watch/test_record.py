"""Is the record of a process whole, whatever becomes of the process?"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jdp.replicas import sealed_memory, stamps
from jdp.watch import record
from jdp.watch.record import Entry, RecordReader, RecordWriter
from tests import harness


@pytest.fixture
def memory():
    mapped, fd, _ = sealed_memory.make_memory(record.NUM_BYTES, label="test")
    yield mapped
    os.close(fd)


def test_a_reader_gets_each_entry_once_in_order(memory):
    reader = RecordReader(memory)
    assert (reader.pid, reader.read()) == (0, [])
    writer = RecordWriter(memory, dump_signal=50)
    before_ns = time.monotonic_ns()
    writer.write(stamps.STEP_BEGUN, 1, "train_step")
    writer.write(stamps.MEETING_BEGUN, 7, "first call of the step `x`")
    after_ns = time.monotonic_ns()
    found = reader.read()
    assert [entry[1:] for entry in found] == [
        (stamps.STEP_BEGUN, 1, "train_step"),
        (stamps.MEETING_BEGUN, 7, "first call of the step `x`"),
    ]
    assert before_ns <= found[0].at_ns <= found[1].at_ns <= after_ns
    assert (reader.pid, reader.dump_signal) == (os.getpid(), 50)
    assert reader.read() == []
    assert reader.read_all() == found


def test_the_newest_entries_are_kept(memory):
    writer, reader = RecordWriter(memory), RecordReader(memory)
    count = 2 * record.NUM_ENTRIES + 100
    for number in range(count):
        writer.write(stamps.STEP_BEGUN, number)
    found = reader.read()
    expected = range(count - record.NUM_ENTRIES, count)
    assert [entry.number for entry in found] == list(expected)
    assert reader.num_lost == count - record.NUM_ENTRIES


def test_names_beyond_the_table_are_empty_and_the_rest_stays_right(memory):
    writer, reader = RecordWriter(memory), RecordReader(memory)
    for number in range(300):
        writer.write(stamps.EAGER_BEGUN, number, f"name {number}")
    writer.write(stamps.EAGER_BEGUN, 300, "é" * 100)
    names = [entry.name for entry in reader.read()]
    assert names[:255] == [f"name {number}" for number in range(255)]
    assert set(names[255:]) == {""}


def test_a_long_name_is_cut(memory):
    writer, reader = RecordWriter(memory), RecordReader(memory)
    writer.write(stamps.EAGER_BEGUN, 0, "x" * 1000)
    (entry,) = reader.read()
    assert entry.name == "x" * 64


def test_entries_of_several_threads_are_all_there(memory):
    writer, reader = RecordWriter(memory), RecordReader(memory)
    num_threads, num_each = 4, 1500

    def write(thread):
        for i in range(num_each):
            writer.write(stamps.READ_BEGUN, thread * num_each + i)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    found = []
    while any(thread.is_alive() for thread in threads):
        found += reader.read()
    found += reader.read()
    numbers = sorted(entry.number for entry in found)
    assert numbers == list(range(num_threads * num_each))


def test_a_later_writer_begins_anew(memory):
    writer, reader = RecordWriter(memory), RecordReader(memory)
    writer.write(stamps.STEP_BEGUN, 1)
    reader.read()
    writer = RecordWriter(memory)
    writer.pid = -1
    record._HEADER.pack_into(memory, 0, record._FORMAT, 1, 0)
    writer.write(stamps.STEP_BEGUN, 2)
    assert [entry.number for entry in reader.read()] == [2]


_WRITE_FOR_EVER = """
import sys
from jdp.replicas import sealed_memory
from jdp.watch import record
offer = sealed_memory.MemoryOffer(sys.argv[1], bytes.fromhex(sys.argv[2]))
memory = sealed_memory.open_memory(offer, record.NUM_BYTES)
writer = record.RecordWriter(memory)
number = 0
while True:
    writer.write(3, number, "step" + "x" * (number % 40))
    number += 1
    if number == 5000:
        print("ready", flush=True)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_the_record_is_whole_at_any_moment(signum):
    mapped, fd, offer = sealed_memory.make_memory(record.NUM_BYTES, label="test")
    reader = RecordReader(mapped)
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITE_FOR_EVER, offer.path, offer.token.hex()],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": harness.python_path()},
    )
    try:
        process.stdout.readline()
        found: list[Entry] = []
        for _ in range(20):  # While the process writes.
            found += reader.read()
        process.send_signal(signum)
        if signum == signal.SIGKILL:
            process.wait()
        else:
            os.waitpid(process.pid, os.WUNTRACED)
        found += reader.read()
        kept = reader.read_all()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(fd)
    for entries in (found, kept):
        assert len(entries) >= record.NUM_ENTRIES // 2
        for entry in entries:
            assert entry.kind == stamps.STEP_BEGUN
            assert entry.name == "step" + "x" * (entry.number % 40)
        numbers = [entry.number for entry in entries]
        assert numbers == sorted(set(numbers))
        times = [entry.at_ns for entry in entries]
        assert times == sorted(times)


def test_an_entry_costs_few_microseconds(memory):
    writer = RecordWriter(memory)
    best_s = float("inf")
    for _ in range(20):
        start_s = time.perf_counter()
        for number in range(1000):
            writer.write(stamps.STEP_BEGUN, number, "train_step")
        best_s = min(best_s, time.perf_counter() - start_s)
    assert best_s / 1000 < 5e-6  # About 1 us; the best of 20 rounds.
