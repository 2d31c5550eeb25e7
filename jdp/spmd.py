"""SPMD: a train step of one replica becomes the step of all of them."""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.core
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from jdp import agreement, compat, mesh, recording, reduction, replicas, weights
from jdp.mesh import World
from jdp.recording import Recording
from jdp.types import PyTree

Step = Callable[..., tuple[PyTree, PyTree]]
_logger = logging.getLogger("jdp")
_NOTHING = contextlib.nullcontext()


@overload
def data_parallel(step: Step, /) -> "DataParallelStep": ...
@overload
def data_parallel(
    step: Step,
    /,
    *,
    world: World | None = ...,
    donate_state: bool = ...,
    check_vma: bool = ...,
    static_graph: bool = ...,
    compiler_options: dict[str, Any] | None = ...,
) -> "DataParallelStep": ...
@overload
def data_parallel(
    step: None = None,
    /,
    *,
    world: World | None = ...,
    donate_state: bool = ...,
    check_vma: bool = ...,
    static_graph: bool = ...,
    compiler_options: dict[str, Any] | None = ...,
) -> Callable[[Step], "DataParallelStep"]: ...
def data_parallel(
    step: Step | None = None,
    /,
    *,
    world: World | None = None,
    donate_state: bool = True,
    check_vma: bool = True,
    static_graph: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Turns the step of one replica into a compiled step of all replicas.

    `step(state, *batches) -> (state, metrics)` is written for one replica: it sees
    that replica's samples, and averages gradients over the axis `world.axis_name` with
    `jdp.value_and_grad`, `jdp.sync_gradients` or `jdp.distributed_optimizer`. Also a
    decorator, with and without arguments.

    Every process calls the returned step, the same number of times. Before a program
    runs for the first time, the processes compare it and the paths, shapes and dtypes
    of its arguments; JAX traces again for other shapes, and they compare again.

    Args:
      step: the step of one replica. The state must come back with the same value on
        every replica. Metrics that differ between replicas are averaged.
      world: the replicas; by default, at the first call, what `jdp.init` made.
      donate_state: whether the memory of the state passed in is used for the new one.
        A donated state cannot be used again.
      check_vma: whether JAX's types must prove that the new state is the same on all
        replicas. False is for reductions that the types cannot follow.
      static_graph: whether it is an error that another trace of the step, for other
        shapes, finds other used parameters or another order of their gradients. False
        logs the difference.
      compiler_options: options of XLA for this step, over jdp's own.

    Returns:
      A callable `(state, *batches) -> (state, metrics)`. The state may be anything
      that `jdp.replicate` takes; every batch is a pytree of host arrays with the
      samples of this process, or what `jdp.global_batch` returned.

    Raises:
      RuntimeError: from a call: the processes do not have the same state or the same
        program; on every process, naming the difference.
      ValueError: from a call: a batch does not divide among the replicas, or the new
        state differs between replicas; the leaf is named.
      RuntimeError: from a call: the state was donated before.
    """

    def wrap(step: Step) -> DataParallelStep:
        return DataParallelStep(
            step,
            world=world,
            donate_state=donate_state,
            check_vma=check_vma,
            static_graph=static_graph,
            compiler_options=compiler_options or {},
        )

    return wrap if step is None else wrap(step)


class DataParallelStep:
    """A step of all replicas; see `data_parallel`."""

    def __init__(
        self,
        step: Step,
        *,
        world: World | None,
        donate_state: bool,
        check_vma: bool,
        static_graph: bool,
        compiler_options: dict[str, Any],
    ):
        """Use `data_parallel`."""
        functools.update_wrapper(self, step)
        self._step = step
        self.name = getattr(step, "__name__", "step")
        self._topic = f"first call of the step `{self.name}`"
        self._world = world
        self._donate_state = donate_state
        self._check_vma = check_vma
        self._static_graph = static_graph
        self._compiler_options = compiler_options
        self._recording: Recording | None = None  # of the last trace.
        self._is_compared = False

    def __call__(self, state: PyTree, *batches: PyTree) -> tuple[PyTree, PyTree]:
        """Runs one step; see `data_parallel`."""
        return self._jitted(*self._place(state, batches))

    def lower(self, state: PyTree, *batches: PyTree) -> jax.stages.Lowered:
        """Lowers the step for arguments of a call, to look at the program.

        Every process calls it, as it would call the step.
        """
        return self._jitted.lower(*self._place(state, batches))

    def trace(self, state: PyTree, *batches: PyTree) -> Recording:
        """Traces the step for arguments like these, to see what it synchronises.

        Values are not read, nothing runs, and no other process is asked.

        Args:
          state: pytree of arrays or `jax.ShapeDtypeStruct`s.
          *batches: the same, with the samples of this process.
        """
        count = self.world.process_count

        def global_aval(leaf: Any) -> jax.ShapeDtypeStruct:
            if isinstance(leaf, jax.Array) and leaf.sharding == self.world.split:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            aval = _aval(leaf)
            return aval.update(shape=(aval.shape[0] * count, *aval.shape[1:]))

        with recording.collect() as found:
            self._shard(jax.tree.map(_aval, state), jax.tree.map(global_aval, batches))
        return found

    @functools.cached_property
    def world(self) -> World:
        """The replicas that the step runs on."""
        return self._world or mesh.current_world()

    def _place(self, state: PyTree, batches: tuple[PyTree, ...]) -> tuple[Any, ...]:
        world = self.world
        # One look at one leaf: a state comes from a step, or is new as a whole. What
        # does not fit otherwise, JAX refuses.
        leaf = _any_leaf(state)
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"The step `{self.name}` was called while JAX traces. It is compiled "
                "as a whole; call it from Python, or use `jdp.value_and_grad` under "
                "your own `jit` and `shard_map`."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise RuntimeError(
                f"The state was donated to an earlier call of `{self.name}`, or of "
                "another function. Go on with the state that it returned, or pass "
                "`donate_state=False` to `jdp.data_parallel`."
            )
        is_new = leaf is not None and not replicas.is_replicated(world, leaf)
        # The other processes may be about to compare theirs with ours.
        is_awaited = is_new or not self._is_compared
        with agreement.reporting(world, self._topic) if is_awaited else _NOTHING:
            batches = mesh.global_batch(world, batches)
        if is_new:
            state = replicas.replicate(world, state)
        return state, *batches

    @functools.cached_property
    def _jitted(self) -> Any:
        def step(state: PyTree, *batches: PyTree) -> tuple[PyTree, PyTree]:
            return self._trace(state, *batches)

        step.__name__ = self.name  # of the compiled program, in profiles and dumps.
        return jax.jit(
            step,
            donate_argnums=(0,) if self._donate_state else (),
            out_shardings=self.world.replicated,
            compiler_options=_default_compiler_options() | self._compiler_options,
        )

    def _trace(self, state: PyTree, *batches: PyTree) -> tuple[PyTree, PyTree]:
        """Runs when JAX traces; compares the program before it can be compiled."""
        world = self.world
        arguments = {"state": state}
        arguments |= {f"batch[{i}]": batch for i, batch in enumerate(batches)}
        with agreement.reporting(world, self._topic):
            with recording.collect() as found:
                sharded, shape = self._shard(state, batches)
            self._check_graph(found)
        replicas.compare_programs(world, sharded.jaxpr, arguments, topic=self._topic)
        self._is_compared = True
        leaves = jax.tree.leaves((state, batches))
        out = jaxpr_as_fun(sharded)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    def _check_graph(self, found: Recording) -> None:
        """Compares with the last trace of this step; warns at the first."""
        before, is_main = self._recording, self.world.is_main_process
        if before is None:
            for facts in found.distinct_losses() if is_main else ():
                recording.warn_of_never_used(facts)
        else:
            difference = recording.graph_difference(before, found)
            text = f"The step `{self.name}` was traced again, and {difference}."
            if difference is not None and self._static_graph:
                raise ValueError(
                    f"{text} With `static_graph=True` every trace must find the same; "
                    "leave it out if the difference is meant."
                )
            if difference is not None and is_main:
                _logger.warning(text)
        self._recording = found

    def _shard(self, state: PyTree, batches: tuple[PyTree, ...]) -> tuple[Any, Any]:
        world = self.world
        single = world.num_replicas == 1
        sharded = jax.shard_map(
            functools.partial(_run_on_replica, self._step, world),
            mesh=world.mesh,
            in_specs=(
                PartitionSpec(),
                *[PartitionSpec(world.axis_names)] * len(batches),
            ),
            out_specs=PartitionSpec(),
            # With one replica there is nothing to prove, and no collective.
            check_vma=self._check_vma and not single,
        )
        make = jax.make_jaxpr(sharded, return_shape=True)
        if not single:
            return make(state, *batches)
        with compat.skip_size_one_axes():
            return make(state, *batches)


def _any_leaf(tree: PyTree) -> Any:
    """Returns some leaf; walks down instead of flattening, 1 µs instead of 16."""
    node = tree
    while isinstance(node, dict | list | tuple) and node:
        node = next(iter(node.values() if isinstance(node, dict) else node))
    if isinstance(node, jax.Array):
        return node
    return next(iter(jax.tree.leaves(tree)), None)


def _aval(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda x: x, leaf)


def _default_compiler_options() -> dict[str, Any]:
    # On CPU this pass merges all all-reduces into one that runs buffer by buffer, after
    # the last gradient. Apart, buckets of 25 MiB overlap with the backward pass: 240 ms
    # a step instead of 300 ms with one flat buffer of 100 MB, and the same time where
    # there is but one bucket (2 processes, gloo; docs/performance.md).
    if jax.default_backend() == "cpu":
        return {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
    return {}


def _run_on_replica(
    step: Step, world: World, state: PyTree, *batches: PyTree
) -> tuple[PyTree, PyTree]:
    with weights.replica() as replica:
        out = step(state, *batches)
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(
            "The step must return a pair `(state, metrics)`, got "
            f"{type(out).__name__}. Return `(state, {{}})` where there are no metrics."
        )
    state, metrics = out
    _check_is_replicated(state, world)
    return state, reduction.average_weighted(
        metrics, world.axis_name, replica.of_metrics
    )


def _check_is_replicated(state: PyTree, world: World) -> None:
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    for path, leaf in flat:
        if compat.varying_axes(leaf) & frozenset(world.axis_names):
            raise ValueError(
                f"The new state's leaf `{jax.tree_util.keystr(path) or '(root)'}` "
                "may differ between the replicas: it depends on a replica's own "
                "samples. Average gradients with `jdp.value_and_grad` or "
                "`jdp.sync_gradients`; pass `check_vma=False` if the leaf is equal for "
                "a reason that types cannot see."
            )
