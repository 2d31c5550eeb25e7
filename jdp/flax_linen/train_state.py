"""Train state of linen: what does a step carry from one batch to the next?"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training import train_state

from jdp.flax_linen import batch_norm_layer
from jdp.flax_linen.loss_scaling import DynamicScale
from jdp.optimizers.local_training import LocalTraining
from jdp.types import PyTree

_OPTIONAL_FIELDS = {"collections", "key", "dynamic_scale"}


class TrainState(train_state.TrainState):
    """Flax's `TrainState`, as the state of a step of `jdp.data_parallel`.

    It has Flax's fields, and classes derive from it as from Flax's, with further
    fields. The fields below can be left out. `tx` is any optax transformation, or one
    that `jdp.distributed_optimizer`, `jdp.zero1` or `jdp.skip_unused` returned.

        @jdp.data_parallel
        def step(state, batch):
            def loss_fn(params):
                logits, updates = state.apply_fn(
                    state.variables(params), batch["image"], mutable=["batch_stats"],
                    rngs=state.rngs("dropout"),
                )
                return cross_entropy(logits, batch["label"]), updates

            (loss, updates), grads = jdp.value_and_grad(loss_fn, has_aux=True)(
                state.params
            )
            return state.apply_gradients(grads=grads, collections=updates), {
                "loss": loss
            }

    Attributes:
      collections: collections of variables that are not trained, such as
        `{"batch_stats": ...}`.
      key: PRNG key, (), from which `rngs` makes the keys of each step.
      dynamic_scale: see `DynamicScale`.
    """

    collections: Mapping[str, PyTree] = struct.field(default_factory=dict, kw_only=True)
    key: jax.Array | None = struct.field(default=None, kw_only=True)
    dynamic_scale: DynamicScale | None = struct.field(default=None, kw_only=True)

    def __init_subclass__(cls, **kwargs: Any):
        """Keeps the fields above keyword-only where a class declares one anew.

        A field keeps the place of its first declaration. Were `key: Any = None` no
        longer keyword-only, no field without a default could follow it.
        """
        for name in _OPTIONAL_FIELDS & cls.__dict__.get("__annotations__", {}).keys():
            default = cls.__dict__.get(name, dataclasses.MISSING)
            if not isinstance(default, dataclasses.Field):
                setattr(cls, name, struct.field(default=default, kw_only=True))
        super().__init_subclass__(**kwargs)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any] | None,
        params: PyTree,
        tx: optax.GradientTransformation,
        sync_batch_norm: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Makes a state with step 0 and the initial state of the optimizer.

        Args:
          apply_fn: usually `model.apply`.
          params: the parameters.
          tx: the optimizer.
          sync_batch_norm: whether each `flax.linen.BatchNorm` that `apply_fn` calls in
            a step uses the statistics of the samples of all replicas, as in
            `sync_batch_norms`.
          **kwargs: further fields.

        Raises:
          TypeError: `tx` is not an optax transformation, such as the result of
            `jdp.local_sgd`, which keeps a state of its own.
          ValueError: `collections` has the parameters.
        """
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise TypeError(
                "`tx` must be an optax transformation, such as `optax.adam(1e-3)` or "
                f"`jdp.zero1(optax.adam(1e-3))`, got {type(tx).__name__}."
            )
        if isinstance(tx, LocalTraining):
            raise TypeError(
                "`tx` is a `jdp.LocalTraining`, whose parameters differ between the "
                "replicas. Let its own state, `training.init(params)`, be the state "
                "of the step."
            )
        _check_no_params(kwargs.get("collections") or {})
        if sync_batch_norm and apply_fn is not None:
            apply_fn = _SyncedApply(apply_fn)
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        # Flax's 0 is a Python number, with which the first step is another program.
        return state.replace(step=jnp.zeros((), jnp.int32))

    def variables(self, params: PyTree | None = None) -> dict[str, PyTree]:
        """Returns the variables for `apply_fn`: parameters and `collections`.

        Args:
          params: the parameters, as the loss gets them; None: the state's own.
        """
        params = self.params if params is None else params
        # The parameters of the loss, not a copy of them that has no gradients.
        return {**self.collections, "params": params}

    def rngs(self, *names: str) -> dict[str, jax.Array]:
        """Returns keys for this step, one per name, such as "dropout".

        In a step of `jdp.data_parallel` they are the same on all replicas; each
        replica draws its part of the numbers that one device would draw.

        Raises:
          ValueError: the state has no `key`.
        """
        if self.key is None:
            raise ValueError(
                "The state has no key. Pass `key=jax.random.key(0)` to "
                "`TrainState.create`."
            )
        key = jax.random.fold_in(self.key, self.step)
        # By name: the key of a name is the same whatever other names there are.
        numbers = {name: zlib.crc32(name.encode()) for name in names}
        return {name: jax.random.fold_in(key, i) for name, i in numbers.items()}

    def apply_gradients(
        self,
        *,
        grads: PyTree,
        is_finite: jax.Array | None = None,
        update_args: Mapping[str, Any] = MappingProxyType({}),
        **kwargs: Any,
    ) -> Self:
        """Updates the parameters with gradients, and counts the step.

        Args:
          grads: pytree like `params`.
          is_finite: bool (), from a `DynamicScale`; where it is False, parameters and
            optimizer state stay as they are, and so do arrays of `collections` whose
            new values are not all finite, such as statistics of a forward pass that
            overflowed. None: True.
          update_args: further arguments of `tx.update`, such as `{"used": used}` of
            `jdp.skip_unused`, or `{"value": loss}`.
          **kwargs: fields with new values. `collections` may leave out collections
            that have not changed.

        Returns:
          The next state.

        Raises:
          ValueError: `collections` has a name that the state's do not have, as the
            variables of one collection do, has the name of a field or "params", or
            lacks a variable that a collection of the state has.
        """
        state = self
        if update_args:
            tx = optax.with_extra_args_support(self.tx)
            update = functools.partial(tx.update, **update_args)
            state = self.replace(tx=optax.GradientTransformation(tx.init, update))
        if "collections" in kwargs:
            kwargs["collections"] = self._update_collections(kwargs["collections"])
        # Flax also knows parameters whose gradient is their new value.
        after = super(TrainState, state).apply_gradients(grads=grads, **kwargs)
        after = after.replace(tx=self.tx)
        if is_finite is None:
            return after

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(is_finite, new, old)

        return after.replace(
            params=jax.tree.map(choose, after.params, self.params),
            opt_state=jax.tree.map(choose, after.opt_state, self.opt_state),
            collections={
                name: _keep_finite(is_finite, variables, self.collections.get(name))
                for name, variables in after.collections.items()
            },
        )

    def _update_collections(self, changed: Mapping[str, PyTree]) -> dict[str, PyTree]:
        _check_no_params(changed)
        unknown = [name for name in changed if name not in self.collections]
        for name in unknown:
            if any(field.name == name for field in dataclasses.fields(self)):
                raise ValueError(
                    f"`collections` has {name!r}, which is a field of the state. The "
                    "field would keep its old value. Pass it by its own name: "
                    f"`apply_gradients(grads=grads, {name}=updates[{name!r}])`."
                )
        if self.collections and unknown:
            raise ValueError(
                f"`collections` has {unknown[0]!r}, which is not a collection of the "
                f"state: it has {', '.join(map(repr, self.collections))}. Pass whole "
                "collections by name, as `apply_fn` returns them: "
                "`collections=updates` instead of "
                '`collections=updates["batch_stats"]`. Leave out collections that the '
                "state does not keep, such as `intermediates`."
            )
        for name in changed.keys() & self.collections.keys():
            _check_kept(name, self.collections[name], changed[name])
        return {**self.collections, **changed}


def _keep_finite(is_finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns the old array where a step overflowed and the new one is not finite."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        return new

    def choose(x: jax.Array, before: jax.Array) -> jax.Array:
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        return jnp.where(is_finite | jnp.isfinite(x).all(), x, before)

    return jax.tree.map(choose, new, old)


def _check_no_params(collections: Mapping[str, PyTree]) -> None:
    if "params" in collections:
        raise ValueError(
            '`collections` has "params". The parameters are the field `params` of the '
            "state; a second copy would not be trained. Pass only the other "
            "collections, such as "
            '`collections={"batch_stats": variables["batch_stats"]}`.'
        )


def _check_kept(name: str, old: PyTree, new: PyTree) -> None:
    """Checks that a changed collection has the variables of the old one.

    `apply_fn` makes variables that are missing anew, with their initial values, so
    running statistics at another level would start again at each step.

    Raises:
      ValueError: a variable is missing.
    """
    after = {path for path, _ in jax.tree_util.tree_leaves_with_path(new)}
    before = [path for path, _ in jax.tree_util.tree_leaves_with_path(old)]
    missing = next((path for path in before if path not in after), None)
    if missing is not None:
        raise ValueError(
            f"`collections[{name!r}]` lacks the variable "
            f"`{jax.tree_util.keystr(missing)}`, which the state has. Pass whole "
            "collections by name, as `apply_fn` returns them: `collections=updates`."
        )


@dataclasses.dataclass(frozen=True)
class _SyncedApply:
    """A function whose batch norms are synced; equal for equal functions."""

    apply_fn: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with batch_norm_layer.sync_batch_norms():
            return self.apply_fn(*args, **kwargs)
