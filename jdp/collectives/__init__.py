"""Collectives: all-reduces that replace `lax.psum`, and a model of their cost."""

from jdp.collectives.adaptive_sum import adasum
from jdp.collectives.auto import AutoAllReduce, auto_all_reduce
from jdp.collectives.base import ReduceScatterAllGather
from jdp.collectives.butterfly import butterfly_all_reduce
from jdp.collectives.cost_model import (
    ALGORITHMS,
    Cost,
    Curve,
    Links,
    Node,
    Work,
    choose,
    predict,
)
from jdp.collectives.fixed_tree import fixed_tree_all_reduce
from jdp.collectives.halving_doubling import (
    HALVING_DOUBLING,
    halving_doubling_all_gather,
    halving_doubling_all_reduce,
    halving_doubling_reduce_scatter,
)
from jdp.collectives.hierarchical import hierarchical_all_reduce
from jdp.collectives.host.tcp_all_reduce import (
    TCP,
    TcpAllReduce,
    open_tcp_links,
    tcp_all_reduce,
)
from jdp.collectives.host.tcp_links import TcpLinks
from jdp.collectives.measurement import fit_links
from jdp.collectives.pallas.all_reduce import PallasAllReduce, pallas_all_reduce
from jdp.collectives.ring import (
    RING,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from jdp.collectives.shared_memory.all_reduce import (
    SHARED_MEMORY,
    SharedMemoryAllReduce,
    create_shared_buffer,
    shared_memory_all_reduce,
)
from jdp.collectives.shared_memory.shared_buffer import SharedBuffer
from jdp.collectives.tree import reduce_broadcast_all_reduce
from jdp.collectives.xla import PSUM, psum_all_reduce

__all__ = [
    "ALGORITHMS",
    "HALVING_DOUBLING",
    "PSUM",
    "RING",
    "SHARED_MEMORY",
    "TCP",
    "AutoAllReduce",
    "Cost",
    "Curve",
    "ReduceScatterAllGather",
    "Links",
    "Node",
    "PallasAllReduce",
    "SharedBuffer",
    "SharedMemoryAllReduce",
    "TcpAllReduce",
    "TcpLinks",
    "Work",
    "adasum",
    "auto_all_reduce",
    "butterfly_all_reduce",
    "choose",
    "create_shared_buffer",
    "fit_links",
    "fixed_tree_all_reduce",
    "halving_doubling_all_gather",
    "halving_doubling_all_reduce",
    "halving_doubling_reduce_scatter",
    "hierarchical_all_reduce",
    "open_tcp_links",
    "pallas_all_reduce",
    "predict",
    "psum_all_reduce",
    "reduce_broadcast_all_reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "shared_memory_all_reduce",
    "tcp_all_reduce",
]
