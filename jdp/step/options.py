"""Step options: how is a step of `jdp.data_parallel` checked and compiled?"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jdp import types
from jdp.fingerprints.record import FingerprintRecord
from jdp.replicas import mesh
from jdp.replicas.mesh import World
from jdp.step.call_arguments import Names


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Checked options of `jdp.data_parallel`."""

    world: World | None
    static_argnames: Names
    replicated_argnames: Names
    donate_state: bool
    split_batches: bool
    num_states: int
    check_vma: bool
    static_graph: bool
    compiler_options: dict[str, Any] | None
    check_every: int | None = None
    record_fingerprints: FingerprintRecord | None = None
    num_shards: int | None = None
    takes_modules: bool = False  # objects of nnx in the state, of which it gets copies.

    def __post_init__(self) -> None:
        """Checks all options but the names, which `CallBinder` checks.

        Raises:
          TypeError: an option has the wrong type.
          ValueError: `num_states`, `check_every` or `num_shards` is below 1.
        """
        if self.world is not None:
            mesh.check_world(self.world)
        flags = {
            "donate_state": self.donate_state,
            "split_batches": self.split_batches,
            "check_vma": self.check_vma,
            "static_graph": self.static_graph,
        }
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise TypeError(f"`{name}` must be True or False, got {value!r}.")
        types.as_count(self.num_states, "num_states", least=1)
        if self.check_every is not None:
            types.as_count(self.check_every, "check_every", least=1)
        if self.num_shards is not None:
            types.as_count(self.num_shards, "num_shards", least=1)
        options = self.compiler_options
        if not (options is None or isinstance(options, dict)):
            raise TypeError(
                "`compiler_options` must be a dict of XLA options, got "
                f"{type(options).__name__}."
            )

    def compile(self, fn: Callable[..., Any], name: str) -> Any:
        """Returns the jitted step of all replicas.

        Args:
          fn: a function whose first argument is the state.
          name: the name of the compiled program, in profiles and dumps.
        """
        fn.__name__ = name
        return jax.jit(
            fn,
            donate_argnums=(0,) if self.donate_state else (),
            compiler_options=_default_compiler_options()
            | (self.compiler_options or {}),
        )


def check_step(step: Any) -> None:
    """Raises TypeError for a step that is not a function."""
    if not callable(step) and not isinstance(step, classmethod | staticmethod):
        raise TypeError(
            "`step` must be a function `(state, *batches) -> (state, metrics)`, got "
            f"{type(step).__name__}. Pass options by name: "
            "`jdp.data_parallel(step, world=world)`."
        )


def _default_compiler_options() -> dict[str, Any]:
    # On CPU this pass merges all all-reduces into one, which runs buffer by buffer
    # after the last gradient. Without it, buckets of 25 MiB overlap with the backward
    # pass: 240 ms per step instead of 300 ms with one flat buffer of 100 MB, and the
    # same time if there is only one bucket (2 processes, gloo; docs/performance.md).
    if jax.default_backend() == "cpu":
        return {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
    return {}
