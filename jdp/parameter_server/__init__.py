"""Parameter server: servers hold the parameters, workers push gradients and pull."""

from jdp.parameter_server.keys import Place, make_keys
from jdp.parameter_server.modes import asynchronous, bounded, sync
from jdp.parameter_server.server import Server, ServerOptions
from jdp.parameter_server.staleness import scale_by_staleness
from jdp.parameter_server.worker import Worker, WorkerOptions

__all__ = [
    "Place",
    "Server",
    "ServerOptions",
    "Worker",
    "WorkerOptions",
    "asynchronous",
    "bounded",
    "make_keys",
    "scale_by_staleness",
    "sync",
]
