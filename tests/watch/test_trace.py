"""Do records of a job become one trace, and a page that a browser shows?"""

import json
import os
import subprocess
import sys

import pytest

from jdp.replicas import stamps
from jdp.watch import record_file, timeline_page, trace
from jdp.watch.record import Entry
from jdp.watch.record_file import Recorded, RecordFiles
from jdp.watch.trace import Span
from tests import browser, harness
from tests.watch import straggler_jobs

MS = 1_000_000


def record(*moments, process=0, host=0):
    """A record of (milliseconds, kind, number, name) each."""
    entries = [
        Entry(int(at * MS), kind, *rest, *((0, "")[len(rest) :]))
        for at, kind, *rest in moments
    ]
    return Recorded(process, host, f"host{host}", 10**18, entries)


def spans(*moments):
    return [tuple(span)[1:] for span in trace.make_spans(record(*moments))]


def step(number, at, *, placed, dispatched, finished):
    """The moments of a step."""
    return [
        (at, stamps.STEP_BEGUN, number, "train"),
        (placed, stamps.STEP_PLACED),
        (dispatched, stamps.STEP_DISPATCHED, number),
        (finished, stamps.STEP_FINISHED, number),
    ]


def test_a_step_is_a_call_and_a_program():
    found = spans(*step(1, 0, placed=1, dispatched=2, finished=9))
    assert found == [
        (0, "call train", 0, 2 * MS, 1, False),
        (1, "train", MS, 9 * MS, 1, False),
    ]


def test_a_program_begins_when_the_one_before_has_ended():
    moments = sorted(
        [
            *step(1, 0, placed=1, dispatched=2, finished=9),
            *step(2, 3, placed=4, dispatched=5, finished=20),
        ]
    )
    programs = [span for span in spans(*moments) if span[0] == 1]
    assert [(begin, end) for _, _, begin, end, _, _ in programs] == [
        (MS, 9 * MS),
        (9 * MS, 20 * MS),
    ]


def test_programs_of_which_only_the_last_is_seen_to_end_share_the_time():
    first, second = (
        step(i, i * 2, placed=i * 2, dispatched=i * 2, finished=12)[:3] for i in (1, 2)
    )
    moments = [*first, *second, (12, stamps.STEP_FINISHED, 2)]
    programs = [span[2:4] for span in spans(*moments) if span[0] == 1]
    assert programs == [(2 * MS, 7 * MS), (7 * MS, 12 * MS)]


def test_what_is_under_way_is_open_to_the_end_of_the_record():
    found = spans(
        (1, stamps.STEP_BEGUN, 1, "train"),
        (2, stamps.STEP_PLACED),
        (3, stamps.MEETING_BEGUN, 4, "check"),
        (8, stamps.READ_BEGUN, 1),
    )
    assert (0, "meeting check", 3 * MS, 8 * MS, 4, True) in found
    assert (1, "train", 2 * MS, 8 * MS, 1, True) in found


def test_a_call_that_raises_has_no_program():
    found = spans(
        (1, stamps.STEP_BEGUN, 1, "train"),
        (2, stamps.STEP_PLACED),
        (3, stamps.STEP_FAILED, 1, "train"),
    )
    assert found == [(0, "call train (raised)", MS, 3 * MS, 1, False)]


def test_entries_that_were_lost_break_nothing():
    kinds = [value for name, value in vars(stamps).items() if name.isupper()]
    kinds = [kind for kind in kinds if isinstance(kind, int)]
    moments = [(i, kind, i % 3) for i, kind in enumerate(kinds * 3)]
    for first in range(len(kinds)):
        for span in trace.make_spans(record(*moments[first::2])):
            assert span.end_ns >= span.begin_ns


def test_the_summary_has_the_slowest_first():
    records = []
    for process, wait in ((0, 6), (1, 0), (2, 3)):
        moments = []
        for i in range(1, 40):
            waited = (i * 10, stamps.REDUCTIONS_WAITED, wait * i * MS)
            moments += [waited, (i * 10, stamps.STEP_BEGUN, i, "train")]
            moments.append((i * 10, stamps.STEP_PLACED))
        records.append(record(*moments, process=process))
    found = trace.summarize(records)
    assert [each.process for each in found] == [1, 2, 0]
    assert [each.num_steps for each in found] == [38, 38, 38]
    assert found[2].shares.waiting_s == pytest.approx(0.006)
    assert found[2].shares.total_s == pytest.approx(0.01)


def test_records_without_common_steps_have_an_empty_summary():
    records = [
        record(*step(i, 1, placed=2, dispatched=3, finished=4), process=i)
        for i in (1, 2)
    ]
    assert [each.num_steps for each in trace.summarize(records)] == [0, 0]
    assert trace.summarize([]) == []


def test_what_is_written_is_read_on_the_clock_of_the_first_host(tmp_path):
    files = RecordFiles(str(tmp_path / "new"), 1)
    first, second = Entry(100, 3, 1, "train"), Entry(200, 5, 1, 'a "name"\n')
    files.write({4: [first]}, offset_ns=0)
    files.write({4: [second], 5: [first]}, offset_ns=1000)
    files.write({}, offset_ns=2000)
    files.close()
    found = record_file.read(tmp_path / "new" / "record_4.jsonl")
    assert (found.process, found.host) == (4, 1)
    assert found.entries == [first, second._replace(at_ns=1200)]
    other = record_file.read(tmp_path / "new" / "record_5.jsonl")
    assert other.entries == [first._replace(at_ns=1100)]


def test_a_record_whose_writer_was_killed_is_read_to_its_last_line(tmp_path):
    files = RecordFiles(str(tmp_path), 0)
    files.write({0: [Entry(i, 3, i, "train") for i in range(9)]}, offset_ns=0)
    files.close()
    path = tmp_path / "record_0.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert len(record_file.read(path).entries) == 8


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", '{"jdp_record": 2}\n', "\xff\n"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a record of jdp"):
        record_file.read(path)


def test_a_broken_line_is_named(tmp_path):
    files = RecordFiles(str(tmp_path), 0)
    files.write({0: [Entry(1, 3, 1, "train")]}, offset_ns=0)
    files.close()
    path = tmp_path / "record_0.jsonl"
    path.write_bytes(path.read_bytes() + b'[1, "x"]\n')
    with pytest.raises(ValueError, match="line 4"):
        record_file.read(path)


def merge(*words):
    command = [sys.executable, "-m", "jdp.cli.main", "timeline", "merge", *words]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=60
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Records of a job of two processes, of which one is slower."""
    path = tmp_path_factory.mktemp("job") / "records"
    options = ("--timeline", str(path))
    straggler_jobs.run("shared memory", factor=1.3, num_steps=60, options=options)
    return path


def test_a_job_becomes_one_trace(folder, tmp_path):
    assert sorted(path.name for path in folder.iterdir()) == [
        "record_0.jsonl",
        "record_1.jsonl",
    ]
    out = tmp_path / "trace.json"
    done = merge(out, folder)
    assert done.stdout == f"{out}: processes 0, 1\n", done.stderr
    events = json.loads(out.read_text())
    for process in (0, 1):
        own = [event for event in events if event["pid"] == process]
        programs = [e for e in own if e["ph"] == "X" and e["name"] == "train"]
        assert len(programs) == 60
        assert all(e["dur"] > 0 and e["ts"] >= 0 for e in programs)
        # A program waits for both processes: they end together, on one clock.
        ends = [e["ts"] + e["dur"] for e in programs]
        others = [
            e["ts"] + e["dur"]
            for e in events
            if e["ph"] == "X" and e["name"] == "train" and e["pid"] != process
        ]
        late = sorted(abs(a - b) for a, b in zip(ends, others, strict=True))
        assert late[len(late) // 2] < 20_000.0  # us; ends are seen at the next call.


def test_a_browser_shows_the_page(folder, tmp_path):
    out = tmp_path / "page.html"
    assert merge(out, folder).returncode == 0
    text = out.read_text()
    assert "http://" not in text and "https://" not in text  # It needs no other file.
    with browser.opened() as chrome:
        chrome.get(out.as_uri())
        rows = chrome.execute_script(
            "return [...document.querySelectorAll('#summary tr')]"
            ".map(row => [...row.cells].map(cell => cell.textContent))"
        )
        assert rows[0][:4] == ["process", "host", "steps", "ms per step"]
        assert [row[0] for row in rows[1:]] == ["1", "0"]  # The slow one comes first.
        waits = [float(row[6].rstrip("%")) for row in rows[1:]]
        assert waits[0] < waits[1]
        find, canvas = (chrome.find_element("id", i) for i in ("search", "lanes"))

        def view():
            shown = canvas.get_attribute("data-begin"), canvas.get_attribute("data-end")
            return tuple(map(float, shown))

        whole = view()
        assert whole[0] == 0.0 and whole[1] > 3000.0
        chrome.find_element("id", "in").click()
        begin, end = view()
        assert end - begin == pytest.approx(whole[1] / 2)
        find.send_keys("call train")
        matches = chrome.find_element("id", "matches")
        assert matches.text == "120 found"  # 60 of each process.
        for _ in range(10):
            chrome.find_element("id", "next").click()
        begin, end = view()
        assert end - begin < 1000.0
        assert "call train, number 10," in chrome.find_element("id", "note").text
        find.send_keys("no such thing")
        assert matches.text == "0 found"
        chrome.find_element("id", "all").click()
        assert view() == whole
        canvas.send_keys("+")
        assert view() != whole
        painted = chrome.execute_script(
            "const c = document.getElementById('lanes');"
            "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            "return new Set(Array.from({length: d.length / 4},"
            "(_, i) => d[4 * i] + ',' + d[4 * i + 1])).size"
        )
        assert painted > 5
        assert chrome.get_log("browser") == []


def test_names_cannot_leave_the_script(tmp_path):
    bad = "</script><script>document.title = 'taken'</script><!--"
    moments = [(1, stamps.STEP_BEGUN, 1, bad), (2, stamps.STEP_PLACED)]
    moments.append((3, stamps.STEP_DISPATCHED, 1))
    text = timeline_page.make([record(*moments)], [(bad, [Span(0, 0, bad, 1, 2, 3)])])
    assert text.count("</script>") == 2
    assert "<!--" not in text


def test_the_timeline_of_the_eager_engine_comes_onto_the_same_clock(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import numpy as np, jdp, sys\n"
        "from jdp import eager\n"
        "world = jdp.init(timeout_s=60)\n"
        "eager.init(world)\n"
        f"eager.start_timeline({str(tmp_path / 'eager.json')!r})\n"
        "for i in range(5):\n"
        "    eager.all_reduce(np.ones(4, np.float32), name='gradient')\n"
        "eager.stop_timeline()\n"
        "eager.shutdown()\n"
    )
    command = [sys.executable, "-m", "jdp.cli.main", "launch", "-n", "2"]
    command += ["--timeline", str(tmp_path / "records"), str(program)]
    environ = {"PYTHONPATH": harness.python_path(), "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, check=True, env=os.environ | environ, timeout=120)
    files = [tmp_path / "records", *tmp_path.glob("eager.rank*.json")]
    assert len(files) == 3
    out = tmp_path / "all.json"
    assert merge(out, *files).stdout == f"{out}: processes 0, 1\n"
    events = [e for e in json.loads(out.read_text()) if e["ph"] == "X"]
    for process in (0, 1):
        own = [e for e in events if e["pid"] == process]
        calls = [e for e in own if e["name"] == "jdp.eager gradient"]
        work = [e for e in own if e["name"] == "NEGOTIATE_ALL_REDUCE"]
        assert len(work) == 5 and calls  # A call may find its result at once.
        begin = min(e["ts"] for e in calls) - 5e4
        end = max(e["ts"] + e["dur"] for e in calls) + 5e4
        assert all(begin <= e["ts"] <= end for e in work)
    page = tmp_path / "all.html"
    assert merge(page, *files).returncode == 0
    assert "process 0, jdp.eager" in page.read_text()


def test_what_cannot_be_merged_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out.json"
    done = merge(out, tmp_path / "empty")
    assert done.returncode == 2 and "has no record_*.jsonl" in done.stderr
    files = RecordFiles(str(tmp_path / "a"), 0)
    files.write({0: [Entry(1, 3, 1, "train")]}, offset_ns=0)
    files.close()
    path = tmp_path / "a" / "record_0.jsonl"
    (tmp_path / "again.jsonl").write_bytes(path.read_bytes())
    done = merge(out, path, tmp_path / "again.jsonl")
    assert done.returncode == 2 and "are both of process 0" in done.stderr
    assert not out.exists()
