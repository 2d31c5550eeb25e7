"""Options of the eager engine, and the environment variables that set them."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

PREFIX = "JDP_EAGER_"
_MAX_SPIN_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagerOptions:
    """Options of the eager engine; the same on all processes.

    Each field can also be set by an environment variable, `JDP_EAGER_` and its name in
    capitals, such as `JDP_EAGER_FUSION_BYTES`. docs/eager.md has Horovod's names.

    Attributes:
      fusion_bytes: most bytes of operations that run as one; 0: no fusion.
      fuse_groups: whether a group may be fused with operations outside of it.
      cycle_time_s: how long, in seconds, the engine holds back requests that no call
        waits for, so that more can be fused with them; up to ten times as long while
        new ones come at least every 50 µs. 0: not at all.
      spin_s: how long, in seconds, the engine polls for news before it sleeps: a thread
        takes some 50 µs to wake. It never polls where the processes of its host do not
        have a core each. At most 1; 0: never.
      cache_capacity: number of requests that the response cache holds; 0: no cache.
      hierarchical_all_reduce: whether to reduce within each host first; needs a world
        with a pair of axis names.
      hierarchical_all_gather: the same for `all_gather`.
      timeout_s: longest wait, in seconds, for a process that has agreed to an
        operation, and for a process that does not answer at all; from 0.01 to 1e6.
      stall_warning_s: seconds after which a warning names the operations that only some
        ranks have submitted; 0: never.
      stall_shutdown_s: seconds after which such an operation ends the engine on all
        processes; 0: never.
      shared_memory_bytes: size of the memory that the processes of a host exchange data
        through, per process and once more; 0: none.
      timeline: file for a trace of each rank (`trace.json` becomes
        `trace.rank0.json`); "": none.
      timeline_mark_cycles: whether the trace shows each cycle.
      flight_recorder_capacity: number of requests that are kept, and written when
        something fails; 0: none.
      flight_recorder_dir: folder for these files; "": the system's folder for temporary
        files.
      autotune: whether the coordinator tunes `fusion_bytes`, `cycle_time_s` and so on
        while the job runs; needs the extra `autotune`.
      autotune_log: CSV file of the tried options; "": none.
      autotune_warmup_samples: number of samples that are discarded at the beginning. A
        sample is a choice of options and its score: the median of five measurements.
      autotune_steps_per_sample: steps per measurement.
      autotune_max_samples: number of samples before the best is kept for good.
      autotune_noise: standard deviation of the noise in the scores, from 0 to 1,
        relative to the standard deviation of the scores.
    """

    fusion_bytes: int = 128 << 20
    fuse_groups: bool = True
    cycle_time_s: float = 1e-3
    spin_s: float = 150e-6
    cache_capacity: int = 1024
    hierarchical_all_reduce: bool = False
    hierarchical_all_gather: bool = False
    timeout_s: float = 30.0
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 0.0
    shared_memory_bytes: int = 16 << 20
    timeline: str = ""
    timeline_mark_cycles: bool = False
    flight_recorder_capacity: int = 2000
    flight_recorder_dir: str = ""
    autotune: bool = False
    autotune_log: str = ""
    autotune_warmup_samples: int = 3
    autotune_steps_per_sample: int = 10
    autotune_max_samples: int = 20
    autotune_noise: float = 0.8

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, bool) != (kind is bool) or not isinstance(
                value, (int, float) if kind is float else kind
            ):
                raise TypeError(
                    f"`{name}` must be of type {kind.__name__}, got {value!r}."
                )
            if kind in (int, float) and not 0 <= value < float("inf"):
                raise ValueError(f"`{name}` must be at least 0, got {value}.")
        if not 0.01 <= self.timeout_s <= 1e6:
            raise ValueError(
                f"`timeout_s` must be from 0.01 to 1e6 seconds, got {self.timeout_s}."
            )
        if self.spin_s > _MAX_SPIN_S:
            raise ValueError(
                f"`spin_s` must be at most {_MAX_SPIN_S:g} second, for which a core "
                f"does nothing else, got {self.spin_s:g}."
            )
        if 0 < self.stall_shutdown_s < self.stall_warning_s:
            raise ValueError(
                f"`stall_shutdown_s` ({self.stall_shutdown_s:g}) must be 0 or at least "
                f"`stall_warning_s` ({self.stall_warning_s:g})."
            )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "EagerOptions":
        """Reads the options from variables; fields without one have their default.

        Args:
          environ: the variables; None: the environment of this process.

        Raises:
          ValueError: a variable does not name an option, or its value is not of the
            option's type.
        """
        environ = os.environ if environ is None else environ
        kinds = get_type_hints(cls)
        values = {}
        for variable, text in environ.items():
            if not variable.startswith(PREFIX):
                continue
            name = variable.removeprefix(PREFIX).lower()
            if name not in kinds:
                known = ", ".join(PREFIX + field.upper() for field in kinds)
                raise ValueError(
                    f"`{variable}` is set in the environment, but there is no such "
                    f"option. Known are {known}."
                )
            values[name] = _parse(variable, text, kinds[name])
        return cls(**values)


class CoordinatorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the coordinator; see the fields of `EagerOptions`."""

    fusion_bytes: int = 128 << 20
    cache_capacity: int = 1024
    fuse_groups: bool = True


def _parse(variable: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"0": False, "1": True, "false": False, "true": True}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        wanted = {bool: "0 or 1", int: "a whole number", float: "a number"}[kind]
        raise ValueError(f"`{variable}` must be {wanted}, got {text!r}.") from None
