"""Module step: how does a train step that changes modules run on all replicas?"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import jax
from flax import errors, nnx

from jdp.flax_nnx import metric_updates
from jdp.flax_nnx.graph_states import Hole, Split, Splitter
from jdp.gradients import step_trace
from jdp.gradients.step_trace import StepTrace
from jdp.replicas.mesh import World
from jdp.step import methods
from jdp.step.data_parallel import DataParallelStep
from jdp.step.options import StepOptions, check_step
from jdp.step.signature import A, P, R, Rest, StepCall, TakesOne
from jdp.trees import nnx_objects
from jdp.types import PyTree

_TAG = "jdp.flax_nnx.data_parallel"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Changed:
    """Holes for the objects of the arguments, as a step has left them."""

    holes: tuple[Hole, ...]


class ModuleStep(StepCall[P, Any, R]):
    """Step of all replicas, as `jdp.flax_nnx.data_parallel` returns it.

    To type checkers it is a function of the arguments of the step that returns what the
    step returns.
    """

    def __init__(self, step: Callable[P, R], options: StepOptions):
        """Use `data_parallel`."""
        check_step(step)
        if isinstance(step, staticmethod | classmethod):
            raise TypeError(
                f"`step` must be a function, got a {type(step).__name__}. Put "
                "`@jdp.flax_nnx.data_parallel` below it."
            )
        functools.update_wrapper(self, step)
        self._step: Callable[..., Any] = step
        self._signature = inspect.signature(step)
        self._splitter = Splitter(_TAG)
        self._inner = DataParallelStep(self._as_function_of_arrays(), options)
        self._bound = methods.PerObject(
            lambda owner: ModuleStep(methods.bind_weakly(step, owner), options),
            _BoundStep,
            what=f"The step `{self.name}`",
        )

    @property
    def name(self) -> str:
        """Name of the function."""
        return self._inner.name

    @property
    def world(self) -> World:
        """The replicas that the step runs on."""
        return self._inner.world

    @overload
    def __get__(
        self, instance: None, owner: type | None = None
    ) -> "ModuleStep[P, R]": ...
    @overload
    def __get__(
        self: TakesOne[A, Rest, Any, R], instance: A, owner: type | None = None
    ) -> StepCall[Rest, Any, R]: ...
    @overload
    def __get__(
        self, instance: object, owner: type | None = None
    ) -> StepCall[P, Any, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns the step of an object, for a step that is a method."""
        if instance is None:
            return self
        if nnx_objects.is_object(instance):  # Its variables are part of the state.
            return functools.partial(self, instance)
        return self._bound.of(instance)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step; see `data_parallel`."""
        with nnx.update_context(_TAG):
            split = self._split(args, kwargs)
            state, (out, changed) = self._inner(split.state, **split.arguments)
            self._splitter.merge(list(changed.holes), state, is_inner=False)
        return out

    if not TYPE_CHECKING:  # For checkers, `StepCall` has it.
        __call__ = _call

    def trace(self, *args: Any, **kwargs: Any) -> StepTrace:
        """Traces the step for such arguments, to see what it synchronises.

        Values are not read, nothing runs, and no other process takes part.

        Args:
          *args: arguments as the step takes them; batches may be
            `jax.ShapeDtypeStruct`s with the shapes of this process' samples.
          **kwargs: arguments by name.
        """
        with nnx.update_context(_TAG):
            split = self._split(args, kwargs)
            return self._inner.trace(split.state, **split.arguments)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the step for such arguments, to inspect the program.

        Every process must call it, as it would call the step. Values are not read.

        Args:
          *args: see `trace`.
          **kwargs: see `trace`.
        """
        with nnx.update_context(_TAG):
            split = self._split(args, kwargs)
            return self._inner.lower(split.state, **split.arguments)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split:
        """Binds the arguments of a call to names, and takes the objects out.

        Raises:
          TypeError: there is no object, or the step does not take such arguments.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"`{self.name}{self._signature}`: {error}.") from None
        named = dict(bound.arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(name, {})
        split = self._splitter.split(self._in_order(named))
        if not split.holes:
            raise TypeError(
                f"No argument of the step `{self.name}{self._signature}` is an nnx "
                "object, so nothing that the step changes would be kept. Pass the "
                "modules that it uses as arguments, such as `(model, optimizer, "
                "metrics, batch)`, or decorate a step without nnx objects with "
                "`jdp.data_parallel`."
            )
        return split

    def _in_order(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns arguments in the order of the signature, as Flax's cache has them."""
        places = {name: i for i, name in enumerate(self._signature.parameters)}
        names = sorted(arguments, key=lambda k: (places.get(k, len(places)), k))
        return {name: arguments[name] for name in names}

    def _as_function_of_arrays(self) -> Callable[..., Any]:
        """Returns the step as `jdp.data_parallel` takes it."""
        leading = [
            name
            for name, parameter in self._signature.parameters.items()
            if parameter.kind is parameter.POSITIONAL_ONLY
        ]

        @functools.wraps(self._step)
        def step(arrays: dict[str, Any], /, **arguments: PyTree) -> tuple[Any, Any]:
            given = self._splitter.merge(arguments, arrays, is_inner=True)
            given = self._in_order(given)
            rest = dict(given)
            first = [rest.pop(name) for name in leading if name in rest]
            with metric_updates.synced(nnx_objects.find(given), self.world.axis_name):
                try:
                    out = self._step(*first, **rest)
                except errors.TraceContextError as error:
                    raise self._explain_trace(error) from error
            self._check_results(out)
            step_trace.current().remedies |= _remedies(given)
            split = self._splitter.split(given)
            return split.state, (out, _Changed(tuple(split.holes)))

        step.__signature__ = _signature_of_arrays(self._signature)  # pyright: ignore
        return step

    def _check_results(self, out: PyTree) -> None:
        """Raises TypeError if the step returns an object."""
        for path, x in nnx_objects.find(out):
            raise TypeError(
                f"The step `{self.name}` returns an nnx object, `{path or '(root)'}` "
                f"({type(x).__name__}). Change the objects that are arguments in "
                "place, and return only arrays."
            )

    def _explain_trace(self, error: Exception) -> ValueError:
        """Explains that the step changes an object out of reach."""
        names = _captured_names(self._step)
        if names:
            text = (
                f"changes an nnx object that it captures ({', '.join(names)}) and that "
                "is not one of its arguments. The object would not get the new "
                f"values. Pass it as an argument: `{self.name}(model, optimizer, "
                "metrics, batch)`."
            )
        else:
            text = (
                "changes an nnx object in a function that JAX transforms, such as a "
                "loss, and that does not get the object as an argument. Pass it: "
                "`jdp.flax_nnx.value_and_grad(loss_fn)(model, batch)`."
            )
        return ValueError(f"The step `{self.name}` {text} Flax says: {error}")


class _BoundStep(ModuleStep[P, R]):
    """Step of one object: shares the attributes of its core and holds the object."""

    __slots__ = ("__self__",)

    def __init__(self, core: ModuleStep[..., R], owner: Any):
        object.__setattr__(self, "__dict__", core.__dict__)
        self.__self__ = owner

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self


def _remedies(arguments: dict[str, Any]) -> dict[str, str]:
    """Returns by name of a leaf what helps if it differs between replicas."""
    remedy = (
        "`sow` has kept it of a replica's own samples. Take it out of the model in the "
        "loss, after the model has run: `nnx.pop(model, nnx.Intermediate)`, which also "
        "returns it."
    )
    remedies = {}
    for root, node in jax.tree_util.tree_leaves_with_path(
        arguments, is_leaf=nnx_objects.is_object
    ):
        if nnx_objects.is_object(node):
            name = jax.tree_util.keystr(root, simple=True, separator=".")
            for path, x in nnx.iter_graph(node):
                if isinstance(x, nnx.Intermediate):
                    remedies[".".join([name, *map(str, path)])] = remedy
    return remedies


def _signature_of_arrays(signature: inspect.Signature) -> inspect.Signature:
    """Returns the signature with the arrays of all objects as first parameter."""
    named, taken = [], signature.parameters
    for parameter in taken.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise TypeError(
                f"A step of nnx objects cannot take `*{parameter.name}`: every "
                "argument needs a name of its own."
            )
        kind = parameter.kind
        if kind is not parameter.VAR_KEYWORD:
            kind = parameter.KEYWORD_ONLY
        named.append(parameter.replace(kind=kind))
    name = "arrays" if "arrays" not in taken else "arrays_of_nnx_objects"
    first = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *named])


def _captured_names(step: Callable[..., Any]) -> list[str]:
    """Returns the names of nnx objects that a function uses and did not get."""
    try:
        found = inspect.getclosurevars(inspect.unwrap(step))
    except TypeError:  # Not a Python function.
        return []
    captured = {**found.globals, **found.nonlocals}
    return [f"`{k}`" for k, v in captured.items() if nnx_objects.find(v)]
