import ast
import pathlib
import time
import zlib

import msgspec
import pytest

import jdp
from jdp.collectives import measurement
from jdp.join import early_exit
from jdp.join.early_exit import DepartureNotice
from jdp.launch import launcher_link
from jdp.launch.endings import Exit
from jdp.replicas import differences, wire
from jdp.runtime.transport import datagram_link, transport
from tests import wire_fuzz
from tests.replicas import comparison_fuzz


class _Note(msgspec.Struct):
    text: str
    numbers: list[int] = []


def test_decode_inverts_encode():
    data = msgspec.msgpack.encode(_Note("a", [1, 2]))
    assert wire.decode(data, _Note, what="A note") == _Note("a", [1, 2])


@pytest.mark.parametrize(
    "data,why",
    [
        (b"", "Input data was truncated"),
        (b"\x81\xa4text\xa2\xff\xfe", "UnicodeDecodeError"),
        (b"\x81\xa1x" + b"\x91" * 100_000, "RecursionError"),
        (b"\xc1", "MessagePack data is malformed"),
        (msgspec.msgpack.encode({"text": 5}), "Expected `str`, got `int`"),
    ],
)
def test_what_is_malformed_is_refused_by_name(data, why):
    with pytest.raises(wire.Malformed, match="A note is malformed") as caught:
        wire.decode(data, _Note, what="A note")
    assert why in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("name", wire_fuzz.MESSAGES)
def test_fuzzed_messages_are_refused_or_decoded(name):
    wire_fuzz.fuzz_decoder(name, 1000, seed=1)


def test_fuzzed_records_have_an_outcome():
    wire_fuzz.fuzz_judge(1000, seed=1)


def test_a_fuzzed_store_shows_only_what_was_signed():
    wire_fuzz.fuzz_store(500, seed=1)


def test_fuzzed_lines_of_a_star_are_refused_or_decoded():
    assert wire_fuzz.fuzz_star(1000, seed=1) > 5


@pytest.mark.parametrize("name", comparison_fuzz.FLOWS)
def test_fuzzed_words_while_programs_are_compared_are_refused(name):
    assert comparison_fuzz.fuzz(name, wire_fuzz.mangle, 500, seed=1) > 50


def _find_decoders():
    """What is decoded where in jdp: the module and the type, as they are written."""
    found = set()
    for path in sorted(pathlib.Path(jdp.__file__).parent.rglob("*.py")):
        if path.name == "wire.py" or {"cli", "bench"} & {*path.parts}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called == "wire.decode":
                found.add(f"{path.stem}: {ast.unparse(node.args[1])}")
            elif called.endswith(".Decoder"):
                found.add(f"{path.stem}: {ast.unparse(node.args[0])}")
            elif called in ("msgspec.msgpack.decode", "msgspec.json.decode"):
                kinds = [k.value for k in node.keywords if k.arg == "type"]
                found.add(f"{path.stem}: {''.join(map(ast.unparse, kinds))}")
    return found


# By the module that fuzzes them.
FUZZED = {
    "wire_fuzz": """
        meeting: MeetingRecord, meeting: MeetingOutcome, shared_segment: SegmentOffer,
        shared_segment: Peer, shared_segment: list[Peer],
        links: LinkPlace, links: list[LinkPlace], rendezvous: _LinkOffer,
        rendezvous: tuple[str; str], rendezvous: MeetingOutcome,
        datagram_link: _LaneOffer,
        rounds: Announcement, rounds: Decision,
        progress_exchange: ProcessProgress, gpu_topology: GpuFacts,
        gpu_topology: list[GpuFacts], measurement: list[Seconds],
        measurement_cache: Machine, measurement_cache: StoredTimes,
        early_exit: DepartureNotice, process_lines: rules.Message,
        launcher_link: Exit, star_codec: Frame, messages: Message,
        fingerprint: _Record""",
    "comparison_fuzz": """
        comparison: Difference, comparison: int, comparison: tuple[str; int],
        comparison: list[bytes], comparison: differences.Details,
        comparison: list[_CapturedArray],
        shared_replicas: dict[int; list[bytes]]""",
    "roll_call_fuzz": "roll_call: kind",
    "eager_fuzz": """
        messages: FromRank, messages: Batch, messages: Spec, startup: _Hello,
        startup: _Answer, encoding: _Array, encoding: , encoding: list,
        flight_recorder: _Header, flight_recorder: Dump""",
    "parameter_server.fuzz": """
        messages: ToServer, messages: ToWorker, messages: ToFollower,
        metrics: ReportLine, keys: Keys, checkpoint_files: _FormatHeader,
        checkpoint_files: Manifest, attendance: AttendanceRecord,
        checkpoint_files: dict[messages.Identity; Settled]""",
    # Files that only their owner gives to a tool.
    "": """
        choice: cls, timeline: list[dict[str; Any]], record: _Head,
        record_file: _Header, record_file: Entry | _Offset, status: JobStatus,
        record: _OutlinesLine, record: _StepLine""",
}


def test_every_decoder_is_fuzzed():
    known = {
        " ".join(name.split()).replace(";", ",")
        for names in FUZZED.values()
        for name in names.split(",")
    }
    assert {" ".join(name.split()) for name in _find_decoders()} == known


NONSENSE = {
    "times": lambda: measurement.make_links([], 2),
    "endless times": lambda: measurement.make_links(
        [measurement.Seconds("ring", 8, [float("nan")])], 2
    ),
    "no text": lambda: differences.unpack(b"x"),
    "cut off": lambda: differences.unpack(zlib.compress(b"abc" * 99)[:-5]),
    "a bomb": lambda: differences.unpack(zlib.compress(bytes(64 << 20), level=1)),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_what_decodes_and_cannot_be_is_refused(name):
    with pytest.raises(wire.Malformed):
        NONSENSE[name]()


@pytest.mark.parametrize(
    "end",
    [
        Exit(2**63, 1),
        Exit(1, 2**40),
        Exit(1, -9999),
        Exit(1, 0, note="why"),
        Exit(-1, 1),
        Exit(1, 1, culprit=-(10**9)),
    ],
)
def test_an_end_that_no_process_has_is_refused(end):
    with pytest.raises(wire.DecodeError, match="no process ends like that"):
        launcher_link.check(end)
    assert launcher_link.check(Exit(1, -9, note="a\x1b")).note == "a\\x1b"


@pytest.mark.parametrize(
    "notice", [DepartureNotice(9, 1), DepartureNotice(1, -1), b"", b"\xc1" * 9]
)
def test_a_notice_that_cannot_be_is_shown_as_one(notice):
    data = notice if isinstance(notice, bytes) else msgspec.msgpack.encode(notice)
    found = early_exit._decode(data, 1)
    assert (found.process, found.num_begun) == (
        1,
        0,
    ) and "malformed" in found.reason


def test_a_lane_with_a_gap_ends_its_link():
    class Link:
        is_woken = False

        def __init__(self):
            self.events, self.lost = [], []

        def watch(self, fd, receive):
            pass

        def send_frame(self, peer, frame):
            pass

        def wait(self, timeout_s):
            assert timeout_s is None or timeout_s < 1.0
            time.sleep(timeout_s or 0.0)
            events, self.events = self.events, []
            return events

        def lose(self, peer, why, events):
            self.lost.append(why)
            events.append(transport.Lost(peer, why))

        def close(self):
            pass

    link = Link()
    lane = datagram_link.LaneLink(link, 0, 2, gap_timeout_s=0.1)
    later = (7).to_bytes(4, "little") + b"later"
    link.events = [transport.Received(1, later)]
    assert [type(event) for event in lane.wait(None)] == [transport.Lost]
    assert link.lost == ["process 1 never sent message 0 of the lane, but 1 after it"]
    lane.close()
