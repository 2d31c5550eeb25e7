"""Timeline page: how do records read as one page in a browser?"""

import pathlib
from collections.abc import Sequence

import msgspec

from jdp.watch import trace
from jdp.watch.record_file import Recorded
from jdp.watch.trace import Summary

_TEMPLATE = pathlib.Path(__file__).with_name("timeline_page.html")
_PLACE = "/*DATA*/"


def make(
    records: Sequence[Recorded], others: Sequence[tuple[str, list[trace.Span]]] = ()
) -> str:
    """Returns a page that needs no other file: a summary, and lanes to zoom and search.

    Args:
      records: records of different processes, by index.
      others: further lanes, with names and spans on the same clock.
    """
    spans_of = {each.process: trace.make_spans(each) for each in records}
    all_spans = [span for each in spans_of.values() for span in each]
    all_spans += [span for _, each in others for span in each]
    first_ns = min((span.begin_ns for span in all_spans), default=0)
    last_ns = max((span.end_ns for span in all_spans), default=1)
    lanes, rows = [], []

    def add(name: str, spans: Sequence[trace.Span]) -> None:
        for span in spans:
            begin_ms = (span.begin_ns - first_ns) / 1e6
            length_ms = (span.end_ns - span.begin_ns) / 1e6
            row = len(lanes), span.name, begin_ms, length_ms, span.number
            rows.append(row)
        lanes.append(name)

    for process, spans in spans_of.items():
        for track, name in enumerate(trace.TRACKS):
            kept = [span for span in spans if span.track == track]
            if kept:
                add(f"process {process}, {name}", kept)
    for name, kept in others:
        add(name, kept)
    data = {
        "length": max(last_ns - first_ns, 1) / 1e6,
        "lanes": lanes,
        "spans": rows,
        "summary": _describe(records, trace.summarize(records)),
    }
    # JSON within a script must not end it, nor begin a comment of HTML.
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return _TEMPLATE.read_text().replace(_PLACE, text)


def _describe(
    records: Sequence[Recorded], summaries: Sequence[Summary]
) -> list[list[str]]:
    hosts = {each.process: each.host_name for each in records}
    lines = []
    for process, num_steps, shares in summaries:
        line = [str(process), hosts[process], f"{num_steps:,}"]
        times = shares.compute_s, shares.reducing_s, shares.waiting_s, shares.loading_s
        line += [
            f"{shares.total_s * 1e3:.3g}",
            *(f"{shares.share(s):.1%}" for s in times),
        ]
        lines.append(line)
    return lines
