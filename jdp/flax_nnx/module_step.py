"""Module step: how does a train step that changes modules run on all replicas?"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, overload

import jax
from flax import errors, nnx

from jdp.flax_nnx import metric_updates
from jdp.flax_nnx.graph_states import Hole, Split, Splitter
from jdp.gradients import step_trace
from jdp.gradients.step_trace import StepTrace
from jdp.replicas.mesh import World
from jdp.step import methods
from jdp.step.call_arguments import Names
from jdp.step.data_parallel import DataParallelStep
from jdp.step.options import StepOptions, check_step
from jdp.trees import nnx_objects
from jdp.types import PyTree

_TAG = "jdp.flax_nnx.data_parallel"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Changed:
    """Holes for the objects of the arguments, as a step has left them."""

    holes: tuple[Hole, ...]


class ModuleStep:
    """Step of all replicas, as `jdp.flax_nnx.data_parallel` returns it."""

    def __init__(self, step: Callable[..., Any], options: StepOptions):
        """Use `data_parallel`."""
        check_step(step)
        if isinstance(step, staticmethod | classmethod):
            raise TypeError(
                f"`step` must be a function, got a {type(step).__name__}. Put "
                "`@jdp.flax_nnx.data_parallel` below it."
            )
        functools.update_wrapper(self, step)
        self._step = step
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

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        """Returns the step of an object, for a step that is a method."""
        if instance is None:
            return self
        if nnx_objects.is_object(instance):  # Its variables are part of the state.
            return functools.partial(self, instance)
        return self._bound.of(instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step; see `data_parallel`."""
        with nnx.update_context(_TAG):
            split = self._split(args, kwargs)
            state, (out, changed) = self._inner(split.state, **split.arguments)
            self._splitter.merge(list(changed.holes), state, is_inner=False)
        return out

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


class _BoundStep(ModuleStep):
    """Step of one object: shares the attributes of its core and holds the object."""

    __slots__ = ("__self__",)

    def __init__(self, core: ModuleStep, owner: Any):
        object.__setattr__(self, "__dict__", core.__dict__)
        self.__self__ = owner

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
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


@overload
def data_parallel(step: Callable[..., Any], /) -> ModuleStep: ...
@overload
def data_parallel(
    step: None = None,
    /,
    *,
    world: World | None = ...,
    static_argnames: Names = ...,
    replicated_argnames: Names = ...,
    donate_state: bool = ...,
    check_vma: bool = ...,
    static_graph: bool = ...,
    compiler_options: dict[str, Any] | None = ...,
) -> Callable[[Callable[..., Any]], ModuleStep]: ...
@overload
def data_parallel(
    step: Callable[..., Any],
    /,
    *,
    world: World | None = ...,
    static_argnames: Names = ...,
    replicated_argnames: Names = ...,
    donate_state: bool = ...,
    check_vma: bool = ...,
    static_graph: bool = ...,
    compiler_options: dict[str, Any] | None = ...,
) -> ModuleStep: ...
def data_parallel(
    step: Callable[..., Any] | None = None,
    /,
    *,
    world: World | None = None,
    static_argnames: Names = None,
    replicated_argnames: Names = None,
    donate_state: bool = False,
    check_vma: bool = True,
    static_graph: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Turns a step that changes nnx objects into a compiled step of all replicas.

    It takes the place of `nnx.jit`. Models, optimizers, metrics and rng streams are
    arguments, which the step changes in place; every other argument is a batch, unless
    an option names it:

        @jdp.flax_nnx.data_parallel
        def train_step(model, optimizer, metrics, batch):
            grad_fn = jdp.flax_nnx.value_and_grad(loss_fn, has_aux=True)
            (loss, logits), grads = grad_fn(model, batch)
            metrics.update(loss=loss, logits=logits, labels=batch["label"])
            optimizer.update(model, grads)

    After a call, the objects of the caller have the new values, and new attributes,
    as after `nnx.jit`. Every process calls the step the same number of times.

    The results equal the results on one device with the samples of all replicas, up to
    the order of summation. Dropout masks, and other random numbers for samples, are
    each replica's part of the numbers that one device would draw. The `update` of an
    `nnx.metrics.Metric` counts the samples of all replicas; numbers without a
    dimension, such as a loss, are averaged. `nnx.BatchNorm` needs
    `convert_batch_norm`.

    Args:
      step: the step of one replica, a function of named arguments.
      world: see `jdp.data_parallel`, as for all options but `donate_state`.
      static_argnames: see there.
      replicated_argnames: see there.
      donate_state: whether the new values reuse the memory of the old ones. With True,
        arrays that the program keeps elsewhere, as `nnx.clone(model)` or
        `nnx.state(model)` do, are gone after the step. With False, as in `nnx.jit`,
        the objects take their memory twice during a step.
      check_vma: see there.
      static_graph: see there.
      compiler_options: see there.

    Returns:
      A callable with the arguments of `step`, which returns what `step` returns, as
      metrics of `jdp.data_parallel`: numbers that differ between the replicas are
      averaged, and a `jdp.PerReplica` has one row per replica.

    Raises:
      TypeError: `step` is not a function, takes `*args`, or an option has the wrong
        type.
      ValueError: a name in an option is not a parameter of the step.
      TypeError: from a call: no argument is an nnx object; the step returns one; or an
        error of `jdp.data_parallel`.
      ValueError: from a call: the step changes an object that is not an argument; or
        an error of `jdp.data_parallel`, such as a parameter that differs between the
        replicas because `nnx.value_and_grad` was left in place.
      RuntimeError: from a call: see `jdp.data_parallel`.
    """
    options = StepOptions(
        world=world,
        static_argnames=static_argnames,
        replicated_argnames=replicated_argnames,
        donate_state=donate_state,
        split_batches=False,
        num_states=1,
        check_vma=check_vma,
        static_graph=static_graph,
        compiler_options=compiler_options,
    )
    if step is None:
        return lambda step: ModuleStep(step, options)
    return ModuleStep(step, options)
