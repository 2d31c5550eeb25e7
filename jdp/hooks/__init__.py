"""Communication hooks: compression of gradients on the wire.

`base` defines the contract. A hook is a pair of pure functions:

    hook = jdp.hooks.power_sgd(rank=4)
    state = {"params": params, "hook": jdp.hooks.init_state(hook, params)}

    @jdp.data_parallel
    def step(state, batch):
        grad_fn = jdp.value_and_grad(loss_fn, hook=hook, hook_state=state["hook"])
        (loss, grads), hook_state = grad_fn(state["params"], batch)
        ...
"""

from jdp.hooks.base import CommHook, ErrorFeedbackState, HookAllReduce
from jdp.hooks.casting import cast, none
from jdp.hooks.chaining import chain
from jdp.hooks.low_rank import PowerSGDState, power_sgd
from jdp.hooks.quantization import int8
from jdp.hooks.row_selection import RowsState, rows
from jdp.hooks.sparsification import top_k
from jdp.hooks.state import init_state

__all__ = [
    "CommHook",
    "ErrorFeedbackState",
    "HookAllReduce",
    "PowerSGDState",
    "RowsState",
    "cast",
    "chain",
    "init_state",
    "int8",
    "none",
    "power_sgd",
    "rows",
    "top_k",
]
