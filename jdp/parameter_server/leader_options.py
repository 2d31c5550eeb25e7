"""Lead options: what server 0 decides by."""

import dataclasses
from typing import Literal

from jdp.parameter_server.modes import Mode


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeadOptions:
    """Options of server 0.

    Attributes:
      mode: when an update is made.
      num_servers: of the job.
      num_workers: for how many workers the first synchronous round waits; when all have
        left again, the job is over.
      lease_s: after how many seconds of silence a worker is left out.
      start_timeout_s: longest wait for `num_workers` workers, in seconds; at the end,
        for those that have gone without a goodbye.
      launch: of the launcher that has started this server; "" for none.
      checkpoint_every: updates from one checkpoint to the next; 0: none by itself.
      nonfinite: what becomes of gradients with NaN or infinity.
    """

    mode: Mode
    num_servers: int = 1
    num_workers: int | None = None
    lease_s: float = 10.0
    start_timeout_s: float = 60.0
    checkpoint_every: int = 0
    nonfinite: Literal["reject", "apply"] = "reject"
    launch: str = ""
