"""Watch: which process do the others wait for, and where does the time of steps go?

`jdp.watch.report()` tells a program what the watch of its job knows. See
docs/when_it_hangs.md.
"""

from jdp.watch.reporting import report as report
from jdp.watch.status import JobStatus as JobStatus
from jdp.watch.status import ProcessStatus as ProcessStatus
from jdp.watch.stragglers import StepShares as StepShares
