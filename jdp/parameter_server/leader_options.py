"""Leader options: which rules does server 0 decide by?"""

import dataclasses
from typing import Literal

from jdp.parameter_server.modes import Mode


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaderOptions:
    """Options of server 0.

    Attributes:
      mode: when servers update.
      num_servers: number of servers of the job.
      num_workers: number of workers that the first synchronous round waits for; once
        all of them have left, the job is over.
      lease_s: seconds of silence after which a worker is left out.
      start_timeout_s: longest wait for `num_workers` workers at the start, in seconds;
        at the end, the longest wait for workers that left without a goodbye.
      launch: id of the launcher that started this server; "" for none.
      checkpoint_every: updates from one checkpoint to the next; 0: none in between.
      nonfinite: whether gradients with NaN or infinity are rejected or applied.
    """

    mode: Mode
    num_servers: int = 1
    num_workers: int | None = None
    lease_s: float = 10.0
    start_timeout_s: float = 60.0
    checkpoint_every: int = 0
    nonfinite: Literal["reject", "apply"] = "reject"
    launch: str = ""
