"""Call batches: which arguments of an evaluation are samples, and what do they lack?"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp.join import batch_spec
from jdp.replicas.mesh import World
from jdp.step import call_arguments, whole_batches
from jdp.step.options import StepOptions
from jdp.types import PyTree

_WEIGHT = "weight"


class PreparedCall(NamedTuple):
    """Arguments of a call after the parameters, which divide among the replicas."""

    weight: Any  # float32 (n,), 0 for padding; None: all samples count the same.
    batches: tuple[PyTree, ...]
    named: dict[str, PyTree]


class CallBatches:
    """Sorts the arguments of one function by the names of its parameters.

    Attributes:
      takes_weight: whether the function has a parameter `weight`.
      signature: the parameters without `weight`.
      step_signature: the same, with the weight after the first parameter.
    """

    def __init__(self, fn: Callable[..., Any], name: str, options: StepOptions):
        """Reads the signature of the function.

        Raises:
          TypeError: the function takes no parameters of a model.
          ValueError: a name in an option is not a parameter of the function.
        """
        self._name = name
        self._splits = options.split_batches
        self._full = inspect.signature(fn)
        self._held = self._read_names("static_argnames", options.static_argnames)
        self._held |= self._read_names(
            "replicated_argnames", options.replicated_argnames
        )
        known = self._full.parameters
        first = next(iter(known.values()), None)
        if first is None or first.kind not in (first.POSITIONAL_ONLY, _EITHER):
            raise TypeError(
                f"`fn` must take the parameters of a model as its first argument, got "
                f"`{name}{self._full}`."
            )
        self._first = first.name
        self.takes_weight = _WEIGHT in known and _WEIGHT not in self._held
        rest = [p for p in known.values() if not self.takes_weight or p.name != _WEIGHT]
        self.signature = self._full.replace(parameters=rest)
        free = "sample_weight" if _WEIGHT in self._held else _WEIGHT
        weight = inspect.Parameter(free, first.kind)
        rest[0] = rest[0].replace(default=inspect.Parameter.empty)
        self.step_signature = self._full.replace(
            parameters=[rest[0], weight, *rest[1:]]
        )

    def prepare(
        self,
        world: World,
        params: PyTree,
        batches: tuple[PyTree, ...],
        weight: jax.typing.ArrayLike | None,
        named: dict[str, PyTree],
        *,
        needs_samples: bool,
    ) -> PreparedCall:
        """Pads the samples of a call so that they divide among the replicas.

        Args:
          world: the replicas.
          params: the first argument.
          batches: the others that were passed by position.
          weight: one number per sample, or None.
          named: arguments passed by name.
          needs_samples: whether to refuse a batch without samples.

        Raises:
          TypeError: the function does not take these arguments.
          ValueError: `weight` does not have one number per sample, or there is no
            sample.
        """
        bound, weight = self._bind(params, batches, weight, named)
        samples = self.batches_of(bound)
        count, is_placed = _count(world, samples)
        if count == 0 and needs_samples:
            raise ValueError(
                f"`{self._name}` was called with a batch without samples, so that "
                "there are no results."
            )
        if weight is not None:
            weight = self._check_weight(weight, count)
        elif self.takes_weight and count is not None:
            weight = np.ones(count, np.float32)
        if count is not None and not is_placed:
            parts = world.num_rows if self._splits else world.num_local_rows
            size = max(1, -(-count // parts)) * parts
            if size != count:
                weight = np.ones(count, np.float32) if weight is None else weight
                self._check_lengths(samples)
                samples, weight = _pad((samples, weight), size)
        if self._splits:
            samples, weight = whole_batches.take_part(world, (samples, weight))
        bound = self.with_batches(bound, samples)
        return PreparedCall(weight, bound.args[1:], bound.kwargs)

    def check_loop(self, batches: Any, named: dict[str, PyTree]) -> None:
        """Raises TypeError for arguments of a call that `over` does not take."""
        if _WEIGHT in named and _WEIGHT not in self._held:
            raise TypeError(
                f"`{self._name}.over` takes no `weight`: each sample of its batches "
                f"counts the same. `{self._name}(params, batch, weight=weight)` takes "
                "the weights of one batch; or add them to the batches, under another "
                "name."
            )
        if hasattr(batches, "shape"):
            raise TypeError(
                f"`batches` of `{self._name}.over` must be an iterable of batches, got "
                f"an array of shape {np.shape(batches)}. Pass `[batch]` for one batch, "
                "or `list(batches)` if its rows are batches."
            )

    def as_arguments(
        self, batch: PyTree, named: dict[str, PyTree]
    ) -> tuple[PyTree, ...]:
        """Returns a batch of `over` as the arguments that it stands for.

        Raises:
          TypeError: the function takes several batches, and `batch` is not as many.
        """
        taken = {self._first, *self._held, *named}
        left = [p for p in self.signature.parameters.values() if p.name not in taken]
        kinds = inspect.Parameter.POSITIONAL_ONLY, _EITHER
        places = [p for p in left if p.kind in kinds]
        has_rest = any(p.kind is p.VAR_POSITIONAL for p in left)
        if len(places) == 1 and not has_rest:
            return (batch,)
        required = [p for p in places if p.default is p.empty]
        if not isinstance(batch, tuple | list) or not (
            len(required) <= len(batch) and (has_rest or len(batch) <= len(places))
        ):
            raise TypeError(
                f"`{self._name}{self._full}` takes {len(places)} batches, so each "
                f"element of `batches` must be a tuple of as many, got "
                f"{type(batch).__name__}"
                + (f" of {len(batch)}." if isinstance(batch, tuple | list) else ".")
            )
        return tuple(batch)

    def batches_of(self, bound: inspect.BoundArguments) -> dict[str, PyTree]:
        """Returns the arguments that are split over the replicas, by name."""
        found = {}
        for name, value in bound.arguments.items():
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                value = {k: v for k, v in value.items() if k not in self._held}
            if name != self._first and name not in self._held:
                found[name] = value
        return found

    def with_batches(
        self, bound: inspect.BoundArguments, batches: dict[str, PyTree]
    ) -> inspect.BoundArguments:
        """Returns the arguments with others in the place of `batches_of`."""
        found = inspect.BoundArguments(bound.signature, dict(bound.arguments))  # pyright: ignore
        for name, value in batches.items():
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                value = {**bound.arguments[name], **value}
            found.arguments[name] = value
        return found

    def with_weight(
        self, bound: inspect.BoundArguments, weight: jax.Array
    ) -> inspect.BoundArguments:
        """Returns the arguments of the function itself, with the weights."""
        arguments = {**bound.arguments, _WEIGHT: weight}
        ordered = {k: arguments[k] for k in self._full.parameters if k in arguments}
        return inspect.BoundArguments(self._full, ordered)  # pyright: ignore

    def _bind(
        self,
        params: PyTree,
        batches: tuple[PyTree, ...],
        weight: jax.typing.ArrayLike | None,
        named: dict[str, PyTree],
    ) -> tuple[inspect.BoundArguments, Any]:
        """Returns the arguments without the weights, and the weights."""
        signature = self.signature
        if self.takes_weight:
            signature = self._full
            bound = signature.bind_partial(params, *batches, **named)
            if _WEIGHT not in bound.arguments:
                named = {**named, _WEIGHT: weight}
        try:
            bound = signature.bind(params, *batches, **named)
        except TypeError as error:
            raise TypeError(
                f"`{self._name}{self._full}` cannot be called with these arguments: "
                f"{error}."
            ) from None
        if self.takes_weight:
            weight = bound.arguments.pop(_WEIGHT)
        return inspect.BoundArguments(self.signature, bound.arguments), weight  # pyright: ignore

    def _read_names(self, option: str, names: call_arguments.Names) -> set[str]:
        """Returns the names in an option."""
        known = self._full.parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
        found = set(call_arguments.as_names(option, names))
        for name in sorted(found - set(known)):
            if not takes_all:
                raise ValueError(
                    f"`{option}` has {name!r}, which is not a parameter of "
                    f"`{self._name}{self._full}`."
                )
        return found

    def _check_lengths(self, samples: dict[str, PyTree]) -> None:
        lengths: dict[Any, str] = {}
        for name, tree in samples.items():
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
                shape = np.shape(leaf)
                where = f"`{name}{jax.tree_util.keystr(path)}`"
                lengths.setdefault(shape[0] if shape else "is a scalar", where)
        if len(lengths) > 1:
            found = ", ".join(f"{where} {n}" for n, where in lengths.items())
            raise ValueError(
                f"The arguments of `{self._name}` have different first dimensions: "
                f"{found}. Each is split over the replicas. If all samples share an "
                "argument, name it in `replicated_argnames`."
            )

    def _check_weight(self, weight: Any, count: int | None) -> np.ndarray | jax.Array:
        if not isinstance(weight, jax.Array):
            weight = np.asarray(weight)
        if weight.ndim != 1 or (count is not None and weight.shape != (count,)):
            expected = "(n,)" if count is None else f"({count},)"
            raise ValueError(
                f"`weight` of `{self._name}` must have one number per sample of this "
                f"process, shape {expected}, got shape {weight.shape}."
            )
        return weight if weight.dtype == np.float64 else weight.astype(np.float32)


_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _count(world: World, samples: PyTree) -> tuple[int | None, bool]:
    """Returns the number of samples of this process, or None without samples.

    And whether they are on the replicas already.
    """
    for leaf in jax.tree.leaves(samples):
        shape = np.shape(leaf)
        if isinstance(leaf, jax.Array) and leaf.sharding == world.split:
            part = shape[0] // world.num_replicas
            return part * world.num_local_replicas, True
        return (shape[0] if shape else None), False
    return None, False


def _pad(tree: PyTree, size: int) -> PyTree:
    return batch_spec.pad_batch(batch_spec.inspect_batch(tree, 0), size)
