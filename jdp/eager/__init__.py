"""Eager: collectives by name, agreed on before they run."""

from jdp.eager.api import (
    all_gather,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    broadcast,
    broadcast_async,
    reduce_scatter,
    reduce_scatter_async,
)
from jdp.eager.barriers import barrier, join, join_async
from jdp.eager.exchange import all_to_all, all_to_all_async
from jdp.eager.grouped import (
    grouped_all_gather,
    grouped_all_gather_async,
    grouped_all_reduce,
    grouped_all_reduce_async,
    grouped_reduce_scatter,
    grouped_reduce_scatter_async,
)
from jdp.eager.handles import poll, synchronize
from jdp.eager.initialization import init
from jdp.eager.objects import (
    all_gather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from jdp.eager.options import EagerOptions
from jdp.eager.process_set import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from jdp.eager.programs import submit, submit_async
from jdp.eager.session import (
    cross_rank,
    cross_size,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from jdp.eager.submission import Handle

__all__ = [
    "EagerOptions",
    "Handle",
    "ProcessSet",
    "add_process_set",
    "all_gather",
    "all_gather_async",
    "all_gather_object",
    "all_reduce",
    "all_reduce_async",
    "all_to_all",
    "all_to_all_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_all_gather",
    "grouped_all_gather_async",
    "grouped_all_reduce",
    "grouped_all_reduce_async",
    "grouped_reduce_scatter",
    "grouped_reduce_scatter_async",
    "init",
    "is_initialized",
    "join",
    "join_async",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reduce_scatter",
    "reduce_scatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "submit",
    "submit_async",
    "synchronize",
]
