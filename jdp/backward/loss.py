"""Loss: a loss function as a program, traced once."""

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxprs_in_params

from jdp import compat
from jdp.backward import contents, exchange, flag_trees, flow, injection, order, usage
from jdp.backward.evaluation import ProgramRunner
from jdp.backward.exchange import ExchangeAnalysis, GatedEvaluation
from jdp.backward.flow import FlowAnalysis, Sets
from jdp.backward.injection import InjectionAnalysis
from jdp.backward.order import Timeline
from jdp.backward.perturbation import find_perturbed
from jdp.backward.usage import MarkedEvaluation, Marks
from jdp.compat import origins, primitives
from jdp.trees import nnx_objects, tree_paths
from jdp.trees.tree_paths import KeyPath
from jdp.types import PyTree


@dataclasses.dataclass(frozen=True)
class LossProgram:
    """A loss as a program of its parameters; other arguments are constants."""

    jaxpr: Any  # closed: (leaves of the parameters) -> (loss, *arrays of aux).
    treedef: Any  # structure of the parameters.
    key_paths: tuple[KeyPath, ...]  # per leaf.
    unflatten_aux: Callable[[list[Any]], PyTree]
    run: Callable[..., list[Any]]  # the function that was traced.
    trace: Callable[[], Any]  # returns its trace, or None once that has ended.

    @functools.cached_property
    def used(self) -> Sets:
        """The leaves that the loss uses, one bit per leaf."""
        return self._followed[1]

    @functools.cached_property
    def never_used(self) -> tuple[int, ...]:
        """The leaves that can never receive a gradient."""
        return tuple(
            i
            for i, v in enumerate(self.jaxpr.jaxpr.invars)
            if not self.used.may >> i & 1 and compat.is_differentiable(v)
        )

    @functools.cached_property
    def undecided(self) -> tuple[int, ...]:
        """The leaves that are used or not, depending on control flow."""
        open_bits = self.used.may & ~self.used.must
        return tuple(i for i in self._indices if open_bits >> i & 1)

    @property
    def markers(self) -> set[str]:
        """The name of each `jdp.sync_in_backward`; see `flow.marker_name`."""
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
        """Whether gradients of a multiple of the loss are as precise.

        They are not if the loss has 16 bits, which would round the factor, or if the
        loss computes in a dtype with a narrower range than float32.
        """
        loss_bits = jnp.finfo(self.jaxpr.out_avals[0].dtype).bits
        return loss_bits >= 32 and not self.has_narrow_range

    @functools.cached_property
    def has_narrow_range(self) -> bool:
        """Whether the loss computes in a dtype with a narrower range than float32."""
        return contents.has_narrow_range(self.jaxpr.jaxpr)

    @functools.cached_property
    def batch_norms(self) -> tuple[str, ...]:
        """The name scopes in which a `BatchNorm` of Flax takes statistics."""
        if "flax" not in sys.modules:
            return ()
        found = contents.find_equations(self.jaxpr.jaxpr, contents.is_of_batch_norm)
        return tuple(dict.fromkeys(str(eqn.source_info.name_stack) for eqn in found))

    @functools.cached_property
    def has_custom_backward(self) -> bool:
        """Whether a `custom_vjp` may make gradients that are not linear in the loss.

        If its rule clips gradients, for example, twice the loss does not have twice the
        gradients.
        """
        found = contents.find_equations(
            self.jaxpr.jaxpr, contents.has_custom_backward, flow.is_marker
        )
        return any(True for _ in found)

    def exchanges(self, axis_names: Collection[str]) -> list[Any]:
        """The collectives over these axes that gradients go through."""
        if not self._has_any_of(exchange.MAY_EXCHANGE):
            return []
        found = ExchangeAnalysis(self._analysis, axis_names, with_casts=False)
        if self._analysis.has_references:  # Values in memory are not followed.
            return found.in_jaxpr(self.jaxpr)
        inputs = [Sets(1 << i, 1 << i) for i in self._indices]
        return list(found.on_path(self.jaxpr, inputs, live=1))

    def gated(
        self, params: PyTree, has_data: jax.Array, axis_names: Collection[str]
    ) -> "LossProgram":
        """Returns the program in which replicas without data send no cotangents."""
        if self._must_rerun:
            raise ValueError(
                "A rule of a `jax.custom_vjp`, `jax.custom_jvp` or "
                "`jax.custom_gradient` closes over a value that the loss computes. "
                "That works with weights only if no gradient goes through a "
                "collective, and here one does. Pass the value to the function as an "
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
        """The backward pass: when it finishes each gradient."""
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
        """Returns the flags of `evaluate_marked`; runs nothing if none is undecided."""
        return self.evaluate_marked(params)[2] if self.undecided else self._used_tree()

    def evaluate_marked(self, params: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
        """Returns the loss, aux, and a tree like `params` of flags: which were used.

        A flag is a Python bool if the program decides it, else an array, bool ().
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
        """Whether a custom rule closes over a value that the loss computes.

        Such a value ends with its trace, so JAX can call the rule only while the
        function runs.
        """
        rules = self._analysis.derivatives
        held = (x for rule in rules for x in contents.tracers_in(rule.jaxpr))
        return any(compat.trace_of(x) is self.trace() for x in held)

    @functools.cached_property
    def _followed(self) -> tuple[FlowAnalysis, Sets]:
        """The analysis of the whole program, and the leaves that reach the loss."""
        analysis = FlowAnalysis(perturbed=self._perturbed)
        return analysis, self._reaching(analysis)

    @functools.cached_property
    def _perturbed(self) -> dict[int, int]:
        if not self._has_any_of(primitives.CUSTOM_RULES):
            return {}
        return find_perturbed(self.jaxpr.jaxpr)

    @functools.cached_property
    def _primitives(self) -> set[str]:
        """The names of all primitives in the program, without "_start"."""
        found: set[str] = set()
        seen: set[int] = set()
        todo = [self.jaxpr]
        while todo:
            body, _ = flow.open_jaxpr(todo.pop())
            if id(body) in seen:
                continue
            seen.add(id(body))
            for eqn in body.eqns:
                found.add(eqn.primitive.name.removesuffix("_start"))
                todo += jaxprs_in_params(eqn.params)
        return found

    def _has_any_of(self, names: Collection[str]) -> bool:
        """Whether the program needs an analysis that concerns these primitives."""
        return not self._primitives.isdisjoint(names)

    @property
    def _indices(self) -> range:
        return range(self.treedef.num_leaves)

    def _reaching(self, analysis: FlowAnalysis) -> Sets:
        inputs = [Sets(1 << i, 1 << i) for i in self._indices]
        found, *_ = analysis.propagate(self.jaxpr.jaxpr, inputs)
        if analysis.has_references:
            # Values may go through memory, which no equation shows.
            invars = self.jaxpr.jaxpr.invars
            everything = sum(
                1 << i for i in self._indices if compat.is_differentiable(invars[i])
            )
            return Sets(everything, everything)
        if not self._has_any_of(injection.RULES):
            return found
        injected = InjectionAnalysis(analysis).collect(self.jaxpr.jaxpr, inputs, live=1)
        return Sets(found.must | injected.must, found.may | injected.may)

    def _used_tree(self, decided: Mapping[int, jax.Array] = {}) -> PyTree:
        leaves = [
            decided[i] if i in decided else bool(self.used.may >> i & 1)
            for i in self._indices
        ]
        return flag_trees.unflatten(self.treedef, leaves)


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

    Only the parameters become inputs of the program. Other arguments are closed over,
    so they need not be arrays. With `allow_int`, parameters may be integers and PRNG
    keys; these count as unused.

    Raises:
      TypeError: a parameter or the loss has a type without gradients, or `loss_fn`
        does not return a pair although `has_aux` is True.
      ValueError: the loss is not a scalar.
    """
    nnx_objects.check_parameters(params)
    if not allow_int:
        check_are_parameters(params)
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    leaves = [leaf for _, leaf in flat]
    rest: list[Callable[[list[Any]], PyTree]] = []
    traces: list[Callable[[], Any]] = []

    def flat_loss(*leaves: jax.Array) -> list[Any]:
        out = loss_fn(jax.tree.unflatten(treedef, leaves), *args, **(kwargs or {}))
        loss, aux = split_loss(loss_fn, out, has_aux)
        arrays, unflatten_aux = partition(aux, jax.Array)
        rest.append(unflatten_aux)
        if not traces and leaves:
            traces.append(weakref.ref(compat.trace_of(leaves[0])))
        return [loss, *arrays]

    closed = jax.make_jaxpr(flat_loss)(*leaves)
    paths = tuple(path for path, _ in flat)
    trace = traces[0] if traces else lambda: None
    return LossProgram(closed, treedef, paths, rest[-1], flat_loss, trace)


def check_are_parameters(params: PyTree) -> None:
    """Raises TypeError, by path, for a parameter that has no gradient."""
    for i, leaf in enumerate(jax.tree.leaves(params)):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None:
            dtype = jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jnp.inexact):
            continue
        path = tree_paths.leaf_paths(params)[i]
        what = "a PRNG key"
        if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            what = f"{dtype}, which has no gradient"
        raise TypeError(
            f"The parameter `{path}` is {what}. Parameters are floating or complex "
            "arrays; pass the rest as a further argument of the loss, close over it, "
            "or pass `allow_int=True`."
        )


def split_loss(
    loss_fn: Callable[..., Any], out: Any, has_aux: bool
) -> tuple[jax.Array, PyTree]:
    """Returns the loss and aux, from the result of `loss_fn`.

    Raises:
      TypeError: `out` is not a pair although `has_aux` is True, or the loss is not a
        real number.
      ValueError: the loss is not a scalar.
    """
    name = getattr(loss_fn, "__name__", "loss_fn")
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(
                f"With `has_aux=True`, `{name}` must return a pair `(loss, aux)`, got "
                f"{type(out).__name__}."
            )
        loss, aux = out
    else:
        loss, aux = out, None
    leaves = jax.tree.leaves(loss)
    if len(leaves) != 1 or leaves[0] is not loss or not hasattr(loss, "dtype"):
        if not isinstance(loss, float):
            is_pair = isinstance(loss, tuple) and not has_aux
            hint = " Pass `has_aux=True` if it is `(loss, aux)`." if is_pair else ""
            raise TypeError(
                f"`{name}` must return a scalar loss, got {type(loss).__name__}.{hint}"
            )
    loss = jnp.asarray(loss)
    if loss.shape != ():
        raise ValueError(
            f"`{name}` must return a scalar loss, got shape {loss.shape}. Take the "
            "mean, or the sum, over samples."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"`{name}` must return a real loss, got {loss.dtype}.")
    return loss, aux


def partition(
    tree: PyTree, kind: type
) -> tuple[list[Any], Callable[[list[Any]], PyTree]]:
    """Splits a tree: its leaves of type `kind`, and a function that replaces them."""
    leaves, treedef = jax.tree.flatten(tree)
    is_taken = [isinstance(x, kind) for x in leaves]
    # The function outlives the trace, so it must not hold the arrays.
    rest = [None if a else x for x, a in zip(leaves, is_taken, strict=True)]

    def unflatten(arrays: list[Any]) -> PyTree:
        left = iter(arrays)
        mixed = [next(left) if a else x for x, a in zip(rest, is_taken, strict=True)]
        return jax.tree.unflatten(treedef, mixed)

    return [x for x, a in zip(leaves, is_taken, strict=True) if a], unflatten


def is_of_synced_batch_norm(eqn: Any) -> bool:
    """Whether an equation belongs to the collectives of `jdp.batch_norm`."""
    return origins.is_bound_by(eqn, origins.BATCH_NORM)
