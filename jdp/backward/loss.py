"""Loss: a loss function as a program, traced once."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from jdp import compat
from jdp.backward import contents, flow, loss_values, order, usage
from jdp.backward.derivatives import is_differentiable
from jdp.backward.evaluation import ProgramRunner
from jdp.backward.exchange import ExchangeAnalysis, GatedEvaluation
from jdp.backward.flow import FlowAnalysis, Sets
from jdp.backward.injection import InjectionAnalysis
from jdp.backward.order import Timeline
from jdp.backward.perturbation import find_perturbed
from jdp.backward.usage import MarkedEvaluation, Marks
from jdp.compat import origins
from jdp.trees import tree_paths
from jdp.types import PyTree


@dataclasses.dataclass(frozen=True)
class LossProgram:
    """A loss function of given parameters, traced; its arguments are constants."""

    jaxpr: Any  # closed: (leaves of the parameters) -> (loss, *arrays of aux).
    treedef: Any  # of the parameters.
    paths: tuple[str, ...]  # of each leaf.
    unflatten_aux: Callable[[list[Any]], PyTree]
    run: Callable[..., list[Any]]  # the function that was traced.
    trace: Callable[[], Any]  # that trace, where something holds it; else None.

    @functools.cached_property
    def used(self) -> Sets:
        """The leaves that the loss uses, a bit each, as far as the program tells."""
        return self._followed[1]

    @functools.cached_property
    def never_used(self) -> tuple[int, ...]:
        """The leaves that can never receive a gradient."""
        return tuple(
            i
            for i, v in enumerate(self.jaxpr.jaxpr.invars)
            if not self.used.may >> i & 1 and is_differentiable(v)
        )

    @functools.cached_property
    def undecided(self) -> tuple[int, ...]:
        """The leaves of which control flow decides whether they are used."""
        open_bits = self.used.may & ~self.used.must
        return tuple(i for i in self._indices if open_bits >> i & 1)

    @property
    def markers(self) -> set[str]:
        """The names of each `jdp.sync_in_backward`; see `flow.marker_name`."""
        return self._analysis.markers

    @functools.cached_property
    def synced_in_backward(self) -> tuple[int, ...]:
        """The leaves whose every use is behind a `jdp.sync_in_backward`."""
        if not self.markers:
            return ()
        analysis = FlowAnalysis(cut_markers=True, perturbed=self._perturbed)
        local = self._reaching(analysis).may
        return tuple(i for i in self._indices if (self.used.may & ~local) >> i & 1)

    @functools.cached_property
    def is_scalable(self) -> bool:
        """Whether a multiple of the loss has gradients that are as precise.

        Not if the loss is of 16 bits, in which the factor would be rounded, nor if
        the range of a dtype within ends before that of float32.
        """
        loss_bits = jnp.finfo(self.jaxpr.out_avals[0].dtype).bits
        return loss_bits >= 32 and not self.has_narrow_range

    @functools.cached_property
    def has_narrow_range(self) -> bool:
        """Whether the range of a dtype within ends before that of float32."""
        return contents.has_narrow_range(self.jaxpr.jaxpr)

    @functools.cached_property
    def batch_norms(self) -> tuple[str, ...]:
        """The name scopes in which a `BatchNorm` of Flax takes statistics."""
        return self._scopes(contents.is_of_batch_norm)

    @functools.cached_property
    def has_custom_backward(self) -> bool:
        """Whether a gradient need not be linear in the loss, by a `custom_vjp`.

        Of such a rule, as one that clips gradients, a multiple of the loss has not the
        multiple of the gradients.
        """
        found = contents.find_equations(
            self.jaxpr.jaxpr, contents.has_custom_backward, flow.is_marker
        )
        return any(True for _ in found)

    def exchanges(self, axis_names: Collection[str]) -> list[Any]:
        """The collectives over these axes that gradients go through."""
        found = ExchangeAnalysis(self._analysis, axis_names, with_casts=False)
        if self._analysis.has_references:  # What goes through memory is not followed.
            return found.in_jaxpr(self.jaxpr)
        inputs = [Sets(1 << i, 1 << i) for i in self._indices]
        return list(found.on_path(self.jaxpr, inputs, live=1))

    def gated(
        self, params: PyTree, has_data: jax.Array, axis_names: Collection[str]
    ) -> "LossProgram":
        """The same, but a replica without data sends others no cotangent."""
        if self._must_rerun:
            raise ValueError(
                "A rule of a `jax.custom_vjp`, `jax.custom_jvp` or "
                "`jax.custom_gradient` closes over a value that the loss computes. "
                "That goes with weights only where no gradient goes through a "
                "collective, as it does here. Pass the value to the function as an "
                "argument."
            )
        analysis = ExchangeAnalysis(self._analysis, axis_names, with_casts=True)
        evaluation = GatedEvaluation(analysis, has_data)

        def run(*leaves: jax.Array) -> list[Any]:
            return evaluation.run(self.jaxpr, leaves)

        made = jax.make_jaxpr(run)(*jax.tree.leaves(params))
        return dataclasses.replace(self, jaxpr=made)

    @functools.cached_property
    def timeline(self) -> Timeline:
        """When the backward pass finishes each gradient."""
        return order.backward_timeline(self.jaxpr.jaxpr, self._analysis)

    def evaluate(self, params: PyTree) -> tuple[jax.Array, PyTree]:
        """Returns the loss and aux."""
        leaves = jax.tree.leaves(params)
        if self._must_rerun:
            loss, *aux = self.run(*leaves)
        else:
            loss, *aux = ProgramRunner().run(self.jaxpr, leaves)
        return loss, self.unflatten_aux(aux)

    def used_by(self, params: PyTree) -> PyTree:
        """Returns the last of `evaluate_marked`; runs nothing if nothing is open."""
        return self.evaluate_marked(params)[2] if self.undecided else self._used_tree()

    def evaluate_marked(self, params: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
        """Returns the loss, aux, and a tree like `params`: whether each leaf was used.

        That is a Python bool where the program decides, else an array, bool ().
        """
        if not self.undecided:
            return *self.evaluate(params), self._used_tree()
        leaves, evaluated = jax.tree.leaves(params), None
        if self._must_rerun:
            evaluated = self.evaluate(params)
            leaves = lax.stop_gradient(leaves)
        varying_over = set().union(
            *map(compat.varying_axes, [*leaves, *self.jaxpr.consts])
        )
        bit = {i: 1 << k for k, i in enumerate(self.undecided)}
        marks = [
            Marks(Sets(bit[i], bit[i]), None) if i in bit else usage.UNMARKED
            for i in self._indices
        ]
        injections = InjectionAnalysis(self._analysis)
        evaluation = MarkedEvaluation(
            self._analysis,
            len(bit),
            sorted(varying_over),
            injections if injections.has_any(self.jaxpr) else None,
        )
        made = evaluation.run(self.jaxpr, leaves, marks, live=1)
        loss, *aux = made.results
        loss, aux = evaluated or (loss, self.unflatten_aux(aux))
        array = evaluation.as_array(evaluation.unite(made.marks[0], made.injected))
        decided = {i: array[k] for k, i in enumerate(self.undecided)}
        return loss, aux, self._used_tree(decided)

    @property
    def _analysis(self) -> FlowAnalysis:
        return self._followed[0]

    @functools.cached_property
    def _must_rerun(self) -> bool:
        """Whether a rule closes over a value of the loss, which ended with its trace.

        JAX can call such a rule only while the function runs.
        """
        rules = self._analysis.derivatives
        held = (x for rule in rules for x in contents.tracers_in(rule.jaxpr))
        return any(compat.trace_of(x) is self.trace() for x in held)

    @functools.cached_property
    def _followed(self) -> tuple[FlowAnalysis, Sets]:
        """The analysis, which has been through the program once, and what it found."""
        analysis = FlowAnalysis(perturbed=self._perturbed)
        return analysis, self._reaching(analysis)

    @functools.cached_property
    def _perturbed(self) -> dict[int, int]:
        return find_perturbed(self.jaxpr.jaxpr)

    def _scopes(self, is_match: Callable[[Any], bool]) -> tuple[str, ...]:
        found = contents.find_equations(self.jaxpr.jaxpr, is_match)
        return tuple(dict.fromkeys(str(eqn.source_info.name_stack) for eqn in found))

    @property
    def _indices(self) -> range:
        return range(self.treedef.num_leaves)

    def _reaching(self, analysis: FlowAnalysis) -> Sets:
        inputs = [Sets(1 << i, 1 << i) for i in self._indices]
        found, *_ = analysis.propagate(self.jaxpr.jaxpr, inputs)
        if analysis.has_references:
            # A value may go through memory, where no equation shows it.
            invars = self.jaxpr.jaxpr.invars
            everything = sum(
                1 << i for i in self._indices if is_differentiable(invars[i])
            )
            return Sets(everything, everything)
        injected = InjectionAnalysis(analysis).collect(self.jaxpr.jaxpr, inputs, live=1)
        return Sets(found.must | injected.must, found.may | injected.may)

    def _used_tree(self, decided: Mapping[int, jax.Array] = {}) -> PyTree:
        leaves = [
            decided[i] if i in decided else bool(self.used.may >> i & 1)
            for i in self._indices
        ]
        return loss_values.unflatten_flags(self.treedef, leaves)


def trace_loss(
    loss_fn: Callable[..., Any],
    params: PyTree,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    has_aux: bool = False,
    allow_int: bool = False,
) -> LossProgram:
    """Traces `loss_fn(params, *args, **kwargs)`.

    Only the parameters become inputs of the program; the rest is closed over, so that
    arguments that are no arrays stay what they are. With `allow_int`, parameters may
    be integers and PRNG keys, which are never used.

    Raises:
      TypeError: a parameter or the loss is of a type that has no gradient, or
        `loss_fn` does not return what `has_aux` says.
      ValueError: the loss is not a scalar.
    """
    if not allow_int:
        loss_values.check_are_parameters(params)
    leaves, treedef = jax.tree.flatten(params)
    rest: list[Callable[[list[Any]], PyTree]] = []
    traces: list[Callable[[], Any]] = []

    def flat_loss(*leaves: jax.Array) -> list[Any]:
        out = loss_fn(jax.tree.unflatten(treedef, leaves), *args, **(kwargs or {}))
        loss, aux = loss_values.split_loss(loss_fn, out, has_aux)
        arrays, unflatten_aux = loss_values.partition(aux, jax.Array)
        rest.append(unflatten_aux)
        if not traces and leaves:
            traces.append(weakref.ref(compat.trace_of(leaves[0])))
        return [loss, *arrays]

    closed = jax.make_jaxpr(flat_loss)(*leaves)
    paths = tuple(tree_paths.leaf_paths(params))
    trace = traces[0] if traces else lambda: None
    return LossProgram(closed, treedef, paths, rest[-1], flat_loss, trace)


def gradient_order(
    loss_fn: Callable[..., Any], params: PyTree, *args: Any
) -> tuple[int, ...]:
    """Returns the order in which the backward pass finishes the gradients.

    It is read from the program of the loss, through `jit`, `remat`, `cond`, `scan`,
    `while` and custom derivatives; nothing is run. A gradient is finished with its
    last contribution, that of the parameter's first use. What control flow makes is
    finished when it ends. `jdp.value_and_grad` uses this order by itself.

    Args:
      loss_fn: `loss_fn(params, *args)` returns a scalar loss.
      params: pytree of floating or complex arrays, or `jax.ShapeDtypeStruct`s.
      *args: what else the loss takes; arrays, or `jax.ShapeDtypeStruct`s.

    Returns:
      The indices into `jax.tree.leaves(params)`, the first gradient first; equal ones
      in reverse, and those that can receive no gradient last. The same for the same
      program, in every process; what `jdp.plan_buckets` takes as `order`.

    Raises:
      TypeError: a parameter is an integer or a PRNG key, by path; or the loss is not
        real.
      ValueError: the loss is not a scalar.
    """
    return trace_abstractly(loss_fn, params, args).timeline.order()


def used_parameters(loss_fn: Callable[..., Any], params: PyTree, *args: Any) -> PyTree:
    """Returns which parameters the loss uses: which receive a gradient.

    A parameter is used if a path of operations that pass a gradient leads from it to
    the loss; `stop_gradient` and what has no derivative cut it. Branches that are not
    taken, and loops that do not run, use nothing.

    In a train step, take `jdp.value_and_grad(find_unused=True)`, which runs the model
    once for both. This runs as much of it as the decisions need.

    Args:
      loss_fn: `loss_fn(params, *args)` returns a scalar loss and has no side effects.
      params: pytree of floating or complex arrays.
      *args: what else the loss takes.

    Returns:
      A pytree like `params`: a Python bool where the program decides, an array, bool
      (), where control flow does; True where a gradient, zero or not, arrives.

    Raises:
      TypeError: a parameter is an integer or a PRNG key, by path; the loss is not
        real; or a class of the parameters does not hold booleans.
      ValueError: the loss is not a scalar, or has side effects.
    """
    program = trace_loss(loss_fn, params, args)
    effects = compat.side_effects(program.jaxpr)
    if effects:
        raise ValueError(
            "The loss has side effects, which `used_parameters` would repeat: "
            f"{', '.join(effects)}. Take the mask from "
            "`jdp.value_and_grad(find_unused=True)`, which runs the loss once, or keep "
            "callbacks and prints out of it."
        )
    return program.used_by(params)


def trace_abstractly(
    loss_fn: Callable[..., Any], params: PyTree, args: tuple[Any, ...]
) -> LossProgram:
    """`trace_loss`, with arrays or `jax.ShapeDtypeStruct`s for all that is an array."""
    loss_values.check_are_parameters(params)
    avals, unflatten_args = loss_values.partition(args, jax.ShapeDtypeStruct)
    programs: list[LossProgram] = []

    def trace(arrays: list[jax.Array]) -> int:
        program = trace_loss(loss_fn, params, unflatten_args(arrays))
        # The values of its constants are of this trace, and end with it.
        avals = [jax.typeof(x) for x in program.jaxpr.consts]
        closed = ClosedJaxpr(program.jaxpr.jaxpr, avals)
        programs.append(dataclasses.replace(program, jaxpr=closed, run=_ended))
        return 0

    jax.make_jaxpr(trace)(avals)
    return programs[-1]


def _ended(*leaves: Any) -> list[Any]:
    raise AssertionError("its arguments ended with their trace")


def is_of_synced_batch_norm(eqn: Any) -> bool:
    """Whether a collective is one of `jdp.batch_norm`."""
    return origins.is_bound_by(eqn, origins.BATCH_NORM)
