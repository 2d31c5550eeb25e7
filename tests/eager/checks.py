"""Checks: named behaviours of the eager engine, many of them in one job."""

import traceback
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp import eager
from jdp.replicas.mesh import World
from tests import harness

INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = INTEGERS + FLOATS
# One of each arithmetic, for what has XLA compile a program for each dtype.
FEW = ("int32", "bfloat16", "float32", "float64")
SHAPES = ((17,), (17, 17), (17, 17, 17))
# What a check that stops on one rank alone does to the others ends by itself.
PATIENCE = {"stall_warning_s": 10.0, "stall_shutdown_s": 20.0}

Check = Callable[["Process"], None]


class Process:
    """What a check is given: who it is, and where it says what is wrong."""

    def __init__(self, world: World, check: str, dtypes: Iterable[str] = DTYPES):
        self.world = world
        self._dtypes = frozenset(dtypes)
        self.rank = world.process_index
        self.size = world.process_count
        self.check = check
        self.problems: list[str] = []

    @property
    def ulps_of_mean(self) -> float:
        """XLA multiplies with the reciprocal, which is exact for powers of two."""
        return 0.0 if self.size & (self.size - 1) == 0 else 2.0

    @property
    def ranks(self) -> range:
        return range(self.size)

    def only(self, dtypes: Iterable[str]) -> tuple[str, ...]:
        """Those that are gone through; what is no number always is."""
        left_out = frozenset(DTYPES) - self._dtypes
        return tuple(dtype for dtype in dtypes if dtype not in left_out)

    def name(self, text: str = "") -> str:
        """A name that no other check has, and that is the same at every repetition."""
        return f"{self.check}/{text}"

    def expect(self, found: Any, expected: Any, what: str = "", *, ulps: float = 0.0):
        """Notes where two trees differ in structure, kind, dtype, shape or value.

        A rank that is not content goes on, as the others do.

        Args:
          found: what was returned.
          expected: what it should be.
          what: said where they differ.
          ulps: how far floats may be apart, in the `eps` of their dtype.
        """
        if jax.tree.structure(found) != jax.tree.structure(expected):
            self.problems.append(f"{what}: {found} is not like {expected}")
            return
        pairs = zip(
            jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
        )
        for (path, a), b in pairs:
            problem = _difference(a, b, ulps)
            if problem:
                self.problems.append(f"{what}{jax.tree_util.keystr(path)}: {problem}")

    def expect_equal(self, found: Any, expected: Any, what: str = "") -> None:
        """Notes where two values of Python differ; keys need not be in order."""
        if found != expected:
            self.problems.append(f"{what}: {found!r}, not {expected!r}")

    def expect_error(
        self, kind: type[Exception], words: Iterable[str], fn: Callable[[], Any]
    ) -> None:
        """Notes it unless `fn` raises, with all of the words; then goes on to work."""
        try:
            value = fn()
        except Exception as error:
            missing = [word for word in words if word not in str(error)]
            if type(error) is not kind or missing:
                self.problems.append(f"{error!r} is no {kind} with {missing}")
        else:
            self.problems.append(f"no error, but {value}")

    def expect_it_works(self, process_set: Any = None) -> None:
        """The engine is usable: all ranks reduce."""
        process_set = process_set or eager.global_process_set
        x = np.arange(5, dtype=np.float32) + self.rank
        expected = 5 * [sum(process_set.ranks)] + np.arange(5) * len(process_set.ranks)
        found = eager.all_reduce(
            x, op="sum", name=self.name("works"), process_set=process_set
        )
        self.expect(found, expected.astype(np.float32), "afterwards")


def run(
    checks: Iterable[Check],
    world: World,
    *,
    repeats: int = 1,
    dtypes: Iterable[str] = DTYPES,
    **options: Any,
) -> dict[str, str]:
    """Runs checks one after the other, on all ranks; the engine is their own.

    Args:
      checks: functions that all ranks call.
      world: the processes.
      repeats: how often each is run; names are cached from the second time on.
      dtypes: those that checks of all of `DTYPES` go through.
      **options: fields of `EagerOptions`.

    Returns:
      By check what was wrong on this rank, "" if nothing was.
    """
    settings = eager.EagerOptions(
        **{**PATIENCE, "flight_recorder_capacity": 0, **options}
    )
    eager.init(world, settings)
    found = {}
    for check in checks:
        process = Process(world, check.__name__, dtypes)
        has_raised = False
        for _ in range(repeats):
            if has_raised or process.problems:
                break
            try:
                check(process)
            except Exception:
                has_raised = True
                process.problems.append(traceback.format_exc())
            if not _is_well(process, has_raised):
                has_raised = True
                eager.shutdown()
                eager.init(world, settings)
        found[check.__name__] = "\n".join(process.problems[:8])
    eager.shutdown()
    return found


def verify(outcome: harness.Outcome, configuration: str, name: str) -> None:
    """Asserts that no rank of a job found anything wrong."""
    assert outcome.exit_code == 0, outcome.output
    found = [each[configuration][name] for each in outcome.values]
    wrong = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text]
    assert not wrong, "\n".join(wrong)


def _is_well(process: Process, has_raised: bool) -> bool:
    """Whether no rank has raised, so that all are at the same place."""
    mine = np.array([has_raised, len(process.problems)])
    try:
        raised, problems = eager.all_reduce(mine, op="sum", name="is well")
    except (RuntimeError, ValueError) as error:
        process.problems.append(f"afterwards: {error}")
        return False
    if problems and not process.problems:  # All stop together.
        process.problems.append("other ranks have found something")
    return not raised


def _difference(a: Any, b: Any, ulps: float) -> str:
    if isinstance(b, np.ndarray | jax.Array):
        if isinstance(b, np.ndarray) != isinstance(a, np.ndarray):
            return f"a {type(a)}, not a {type(b)}"
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        if isinstance(a, np.ndarray) and not a.flags.writeable:
            return "it cannot be written to"
        a, b = np.asarray(a), np.asarray(b)
        rtol = 0.0
        if a.dtype.kind not in "iub":
            rtol = ulps * float(jnp.finfo(a.dtype).eps)
            wide = np.complex128 if a.dtype.kind == "c" else np.float64
            a, b = a.astype(wide), b.astype(wide)
        is_same = (a == b) | ((a != a) & (b != b))
        if rtol:
            is_same |= np.abs(a - b) <= rtol * np.abs(b)
        if is_same.all():
            return ""
        wrong = np.argwhere(~is_same)[0]
        place = tuple(wrong.tolist())
        return f"{a[place]} at {place}, not {b[place]}; {(~is_same).sum()} are wrong"
    if type(a) is not type(b) or a != b:
        return f"{a!r}, not {b!r}"
    return ""


# Tensors whose values are formulas of the rank.


def numbers(rank: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Whole numbers, exact in every dtype and in the sums of a few ranks."""
    rng = np.random.default_rng(seed)
    return rng.integers(-100, 100, size=shape) + 5 * rank


def tensors(
    rank: int, dtypes: Iterable[str] = DTYPES, shapes: Iterable[tuple] = SHAPES
) -> dict[str, np.ndarray]:
    """What a rank gives: every dtype in every shape; unsigned ones wrap around."""
    return {
        f"{dtype} {shape}": numbers(rank, shape, len(shape)).astype(np.dtype(dtype))
        for dtype in dtypes
        for shape in shapes
    }


def combine(
    fn: Callable[[list[np.ndarray]], np.ndarray], trees: list[dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """What all ranks get: `fn` of all, computed exactly, in the dtype of each."""
    out = {}
    for key, first in trees[0].items():
        wide = np.int64 if first.dtype.kind in "iu" else np.float64
        whole = fn([tree[key].astype(wide) for tree in trees])
        out[key] = whole.astype(first.dtype)
    return out


def mean(trees: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The sum in the dtype, divided; of integers cut off."""
    count, out = len(trees), {}
    for key, total in combine(sum, trees).items():
        if total.dtype.kind in "iu":
            wide = total.astype(np.int64)
            out[key] = (np.sign(wide) * (np.abs(wide) // count)).astype(total.dtype)
        else:
            exact = sum(tree[key].astype(np.float64) for tree in trees)
            out[key] = (exact / count).astype(total.dtype)
    return out


def scale(tree: dict[str, np.ndarray], factor: float) -> dict[str, np.ndarray]:
    """Integers in float64 and cut off, 16-bit floats in float32."""
    return {key: _scale(x, factor) for key, x in tree.items()}


def _scale(x: np.ndarray, factor: float) -> np.ndarray:
    if x.dtype.kind in "iu":
        return np.trunc(x.astype(np.float64) * factor).astype(x.dtype)
    if x.dtype.itemsize == 2:
        return (x.astype(np.float32) * np.float32(factor)).astype(x.dtype)
    return x * x.dtype.type(factor)


def for_jax(me: Process, tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of tensors in every dtype and shape some that show each of both.

    Results become arrays of JAX by `jnp.asarray`, which knows of no ranks and compiles
    a program for each pair: all dtypes in one shape will do, and on two ranks.
    """
    dtypes = (*me.only(DTYPES if me.size == 2 else FEW), "bool")
    shape = next(iter(tree)).split(" ", 1)[1]
    chosen = {f"{dtype} {shape}" for dtype in dtypes}
    return {k: x for k, x in tree.items() if k in chosen or k.startswith("float32 ")}


def as_jax(tree: Any) -> Any:
    """The same tree of arrays of JAX, all dtypes as they are."""
    with jax.enable_x64(True):  # `jnp.asarray` would compile something for each.
        return jax.device_put(tree)
