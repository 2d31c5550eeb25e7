"""Prometheus: where does a monitoring system find the status of a job?"""

import importlib.util
from collections.abc import Iterator
from typing import Any

from jdp.watch.status import JobStatus, ProcessStatus

_LOOPBACK = "127.0.0.1"


def check_port(port: int | None) -> None:
    """Checks a port, and that the library is there; None: no endpoint.

    Raises:
      ValueError: it is not a port, or the library is not installed.
    """
    if port is None:
        return
    if not 0 < port < 1 << 16:
        raise ValueError(f"`prometheus_port` must be from 1 to 65535, got {port}.")
    if importlib.util.find_spec("prometheus_client") is None:
        raise ValueError(
            "`prometheus_port` needs a library: `pip install 'jdp[prometheus]'`."
        )


class Exporter:
    """Endpoint on loopback; `found` is what it shows.

    Attributes:
      found: the last status; None: there is none yet.
    """

    def __init__(self, port: int):
        """Opens the port.

        Args:
          port: port of loopback.

        Raises:
          OSError: it is not free.
        """
        # Imported late: only jobs with an endpoint need it.
        import prometheus_client

        self.found: JobStatus | None = None
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self))
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, addr=_LOOPBACK, registry=registry
            )
        except OSError as error:
            text = f"port {port} of `prometheus_port` is not free ({error.strerror})"
            raise OSError(error.errno, text) from None

    def close(self) -> None:
        """Closes the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector:
    """Metrics of the last status, for a registry of `prometheus_client`."""

    def __init__(self, exporter: Exporter):
        self._exporter = exporter

    def collect(self) -> Iterator[Any]:
        from prometheus_client import core

        found = self._exporter.found
        rows = () if found is None else found.processes
        for name, text, kind, read in _METRICS:
            make = core.CounterMetricFamily
            if kind == "gauge":
                make = core.GaugeMetricFamily
            family = make(f"jdp_{name}", text, labels=["process", "host"])
            for row in rows:
                family.add_metric([str(row.process), row.host], float(read(row)))
            yield family
        states = core.GaugeMetricFamily(
            "jdp_process_state",
            "1 for the state and the place of a process.",
            labels=["process", "host", "state", "place"],
        )
        for row in rows:
            states.add_metric([str(row.process), row.host, row.state, row.place], 1.0)
        yield states


def _read_step(row: ProcessStatus) -> float:
    return row.step


_METRICS = (
    ("steps", "Steps that the process has begun.", "counter", _read_step),
    (
        "step_seconds",
        "Time of a step, a moving average.",
        "gauge",
        lambda row: row.recent.total_s,
    ),
    (
        "compute_seconds",
        "Part of a step in which the process computes.",
        "gauge",
        lambda row: row.recent.compute_s,
    ),
    (
        "reducing_seconds",
        "Part of a step in which the process reduces through shared memory.",
        "gauge",
        lambda row: row.recent.reducing_s,
    ),
    (
        "waiting_seconds",
        "Part of a step in which the process waits for others.",
        "gauge",
        lambda row: row.recent.waiting_s,
    ),
    (
        "loading_seconds",
        "Part of a step in which the process waits for its loader.",
        "gauge",
        lambda row: row.recent.loading_s,
    ),
    (
        "is_straggler",
        "1 if the process is slower than the others.",
        "gauge",
        lambda row: row.slow_since > 0,
    ),
)
