"""Optax cases: every optimizer and wrapper of optax, and how it is called.

A case that is missing here fails `test_every_optimizer.py`, so that a new one in a
later optax is not taken for one that works.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib, transforms

MODULES = (optax, contrib, transforms)
# A matrix, a vector and a scalar, whose sizes do not divide among replicas.
SHAPES = {"m": (3, 5), "s": (), "v": (6,)}
# Of what `update` is given beside gradients, state and parameters.
Extra = tuple[str, ...]
MIXES = "on one parameter at a time"
SINGLE = "mix gradients of single samples"


class Case(NamedTuple):
    """One optimizer or wrapper."""

    make: Callable[[], Any]
    extra: Extra = ()
    refused_by_skip_unused: str | None = None  # the message.
    refused_by_all: str | None = None
    is_lookahead: bool = False
    refused_by_zero1: str | None = None
    grows: bool = False  # its state, in the first step.
    # Noise is another for each parameter.
    differs_in_skip_unused: bool = False
    has_scalars: bool = True  # optax fails for them.
    atol: float = 2e-6


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda x: "a" if jnp.ndim(x) > 1 else "b", params)


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.ndim(x) > 1, params)


def _labels_are(label: str) -> Any:
    shapes = {k: jnp.zeros(shape) for k, shape in SHAPES.items()}
    return jax.tree.map(lambda x: x == label, _labels(shapes))


def _injected(**kwargs: Any) -> Any:
    return optax.inject_hyperparams(optax.adam)(**kwargs)


def _every(step: Any, updates: Any = None, **_: Any) -> Any:
    return jnp.asarray(step) % 2 == 0


ADAM, SGD = optax.adam(0.05), optax.sgd(0.1)


def _chain_of_several() -> Any:
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.add_decayed_weights(0.01, mask=_is_matrix),
        optax.scale_by_adam(),
        optax.ema(0.5),
        optax.scale_by_schedule(optax.linear_schedule(-0.1, -0.01, 5)),
    )


VALUE: Extra = ("value",)
SEARCH: Extra = ("value", "grad", "value_fn")
PER_SAMPLE = {"refused_by_all": SINGLE}
GROWS = {"refused_by_zero1": "the state of its `init`", "grows": True}
MIXED = {"refused_by_skip_unused": MIXES}

# By name in optax, and then what it is with, if anything.
CASES: dict[str, Case] = {
    "adabelief": Case(lambda: optax.adabelief(0.05)),
    "adadelta": Case(lambda: optax.adadelta(0.5)),
    "adafactor": Case(lambda: optax.adafactor(0.1, min_dim_size_to_factor=2)),
    "adagrad": Case(lambda: optax.adagrad(0.1)),
    "adam": Case(lambda: optax.adam(0.05)),
    "adamax": Case(lambda: optax.adamax(0.05)),
    "adamaxw": Case(lambda: optax.adamaxw(0.05)),
    "adamw": Case(lambda: optax.adamw(0.05, weight_decay=0.1, mask=_is_matrix)),
    "adan": Case(lambda: optax.adan(0.05)),
    "adaptive_grad_clip": Case(
        lambda: optax.chain(optax.adaptive_grad_clip(0.01), SGD)
    ),
    "amsgrad": Case(lambda: optax.amsgrad(0.05)),
    "apply_every": Case(lambda: optax.chain(optax.sgd(0.1), optax.apply_every(2))),
    "apply_if_finite": Case(lambda: optax.apply_if_finite(ADAM, 3), **MIXED),
    "centralize": Case(lambda: optax.chain(optax.centralize(), SGD)),
    "chain": Case(_chain_of_several, **MIXED),
    "clip": Case(lambda: optax.chain(optax.clip(0.1), SGD)),
    "clip_by_block_rms": Case(lambda: optax.chain(optax.clip_by_block_rms(0.1), SGD)),
    "conditionally_mask": Case(lambda: optax.conditionally_mask(SGD, _every)),
    "conditionally_transform": Case(lambda: optax.conditionally_transform(SGD, _every)),
    "flatten": Case(lambda: optax.flatten(ADAM), **MIXED),
    "freeze": Case(lambda: optax.chain(SGD, optax.freeze(_labels_are("b")))),
    "fromage": Case(lambda: optax.fromage(0.1)),
    "identity": Case(lambda: optax.chain(optax.identity(), SGD)),
    "inject_hyperparams": Case(
        lambda: _injected(learning_rate=optax.linear_schedule(0.1, 0.0, 5), b1=0.8)
    ),
    "keep_params_nonnegative": Case(
        lambda: optax.chain(SGD, optax.keep_params_nonnegative())
    ),
    "lamb": Case(lambda: optax.lamb(0.05)),
    "lars": Case(lambda: optax.lars(0.1)),
    "lbfgs": Case(lambda: optax.lbfgs(), SEARCH, **MIXED, atol=2e-5),
    "lbfgs with backtracking": Case(
        lambda: optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(6)),
        SEARCH,
        **MIXED,
        atol=2e-5,
    ),
    "lbfgs without a search": Case(
        lambda: optax.lbfgs(0.1, linesearch=None), **MIXED, atol=2e-5
    ),
    "lion": Case(lambda: optax.lion(0.05)),
    "lookahead": Case(
        lambda: optax.lookahead(SGD, 2, 0.5),
        refused_by_skip_unused="does not have the structure",
        is_lookahead=True,
    ),
    "measure_with_ema": Case(
        lambda: optax.chain(
            SGD, optax.monitor({"n": optax.measure_with_ema(optax.tree.norm, 0.9)})
        ),
        **MIXED,
        **GROWS,
    ),
    "monitor": Case(
        lambda: optax.chain(SGD, optax.monitor({"norm": optax.tree.norm})),
        **MIXED,
        **GROWS,
    ),
    "multi_transform": Case(
        lambda: optax.multi_transform({"a": ADAM, "b": SGD}, _labels)
    ),
    "MultiSteps": Case(
        lambda: optax.MultiSteps(ADAM, 2).gradient_transformation(),
    ),
    "nadam": Case(lambda: optax.nadam(0.05)),
    "nadamw": Case(lambda: optax.nadamw(0.05)),
    "named_chain": Case(lambda: optax.named_chain(("a", optax.clip(0.1)), ("b", ADAM))),
    "noisy_sgd": Case(lambda: optax.noisy_sgd(0.1, key=0), differs_in_skip_unused=True),
    "normalize_by_update_norm": Case(
        lambda: optax.chain(optax.normalize_by_update_norm(), SGD), **MIXED
    ),
    "novograd": Case(lambda: optax.novograd(0.05)),
    "optimistic_adam_v2": Case(lambda: optax.optimistic_adam_v2(0.05)),
    "optimistic_gradient_descent": Case(
        lambda: optax.optimistic_gradient_descent(0.05)
    ),
    "partition": Case(lambda: optax.partition({"a": ADAM, "b": SGD}, _labels)),
    "polyak_sgd": Case(lambda: optax.polyak_sgd(), VALUE, **MIXED),
    "radam": Case(lambda: optax.radam(0.05)),
    "rmsprop": Case(lambda: optax.rmsprop(0.05, momentum=0.9, centered=True)),
    "rprop": Case(lambda: optax.rprop(0.05)),
    "scale_by_backtracking_linesearch": Case(
        lambda: optax.chain(
            optax.sgd(1.0), optax.scale_by_backtracking_linesearch(4, store_grad=True)
        ),
        SEARCH,
        **MIXED,
    ),
    "scale_by_distance_over_gradients": Case(
        lambda: optax.scale_by_distance_over_gradients(), has_scalars=False
    ),
    "scale_by_param_block_norm": Case(lambda: optax.scale_by_param_block_norm()),
    "selective_transform": Case(
        lambda: optax.selective_transform(ADAM, freeze_mask=_labels_are("b"))
    ),
    "set_to_zero": Case(lambda: optax.set_to_zero()),
    "sgd": Case(lambda: optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "sign_sgd": Case(lambda: optax.sign_sgd(0.05)),
    "signum": Case(lambda: optax.signum(0.05)),
    "skip_large_updates": Case(
        lambda: optax.MultiSteps(
            ADAM,
            2,
            should_skip_update_fn=functools.partial(
                optax.skip_large_updates, max_squared_norm=100.0
            ),
        ).gradient_transformation(),
        **MIXED,
    ),
    "skip_not_finite": Case(
        lambda: optax.MultiSteps(
            ADAM, 2, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation(),
        **MIXED,
    ),
    "sm3": Case(lambda: optax.sm3(0.1), has_scalars=False),
    "snapshot": Case(
        lambda: optax.chain(SGD, optax.snapshot("norm", optax.tree.norm)), **MIXED
    ),
    "stateless": Case(
        lambda: optax.stateless(lambda g, p: jax.tree.map(lambda x: -0.1 * x, g))
    ),
    "stateless_with_tree_map": Case(
        lambda: optax.stateless_with_tree_map(lambda g, p: -0.1 * g + 0.01 * p)
    ),
    "yogi": Case(lambda: optax.yogi(0.05)),
    "zero_nans": Case(lambda: optax.chain(optax.zero_nans(), SGD)),
    # optax.contrib
    "acprop": Case(lambda: contrib.acprop(0.05)),
    "ademamix": Case(lambda: contrib.ademamix(0.05)),
    "adopt": Case(lambda: contrib.adopt(0.05)),
    "cocob": Case(lambda: contrib.cocob()),
    "dadapt_adamw": Case(lambda: contrib.dadapt_adamw(), **MIXED),
    "differentially_private_aggregate": Case(
        lambda: contrib.differentially_private_aggregate(1.0, 0.1, key=0), **PER_SAMPLE
    ),
    "dog": Case(lambda: contrib.dog(), **MIXED),
    "dowg": Case(lambda: contrib.dowg(), **MIXED),
    "dpsgd": Case(lambda: contrib.dpsgd(0.1, 1.0, 0.1, seed=0), **PER_SAMPLE),
    "galore": Case(lambda: contrib.galore(0.05, rank=2)),
    "madgrad": Case(lambda: contrib.madgrad(0.05)),
    "mechanize": Case(lambda: contrib.mechanize(ADAM), **MIXED),
    "momo": Case(lambda: contrib.momo(), VALUE, **MIXED),
    "momo_adam": Case(lambda: contrib.momo_adam(), VALUE, **MIXED),
    "muon": Case(lambda: contrib.muon(0.05)),
    "normalize": Case(lambda: optax.chain(contrib.normalize(), SGD), **MIXED),
    "prodigy": Case(lambda: contrib.prodigy(), **MIXED),
    "reduce_on_plateau": Case(
        lambda: optax.chain(SGD, contrib.reduce_on_plateau(patience=1)), VALUE
    ),
    "sam": Case(
        lambda: contrib.sam(SGD, optax.chain(contrib.normalize(), SGD)), **MIXED
    ),
    "sam with a function": Case(
        lambda: contrib.sam(SGD, SGD, opaque_mode=True), ("grad_fn",), **MIXED
    ),
    "schedule_free": Case(lambda: contrib.schedule_free(SGD, 0.1)),
    "schedule_free_adamw": Case(lambda: contrib.schedule_free_adamw(0.05)),
    "schedule_free_sgd": Case(lambda: contrib.schedule_free_sgd(0.1)),
    "simplified_ademamix": Case(lambda: contrib.simplified_ademamix(0.05)),
    "sophia": Case(
        lambda: contrib.sophia(
            0.05,
            update_interval=2,
            hessian_diagonal_fn=contrib.hutchinson_estimator_diag_hessian(
                jax.random.PRNGKey(0)
            ),
        ),
        ("obj_fn",),
        **MIXED,
    ),
    "split_real_and_imaginary": Case(lambda: contrib.split_real_and_imaginary(ADAM)),
}

# What runs in another case.
INSIDE = {
    "inject_stateful_hyperparams": "inject_hyperparams",
    "scale_by_adadelta": "adadelta",
    "scale_by_adam": "adam",
    "scale_by_adamax": "adamax",
    "scale_by_adan": "adan",
    "scale_by_amsgrad": "amsgrad",
    "scale_by_belief": "adabelief",
    "scale_by_factored_rms": "adafactor",
    "scale_by_learning_rate": "sgd",
    "scale_by_lion": "lion",
    "scale_by_novograd": "novograd",
    "scale_by_optimistic_gradient": "optimistic_gradient_descent",
    "scale_by_param_block_rms": "adafactor",
    "scale_by_radam": "radam",
    "scale_by_rms": "rmsprop",
    "scale_by_rprop": "rprop",
    "scale_by_rss": "adagrad",
    "scale_by_schedule": "chain",
    "scale_by_sign": "sign_sgd",
    "scale_by_sm3": "sm3",
    "scale_by_trust_ratio": "lamb",
    "scale_by_yogi": "yogi",
    "scale_by_acprop": "acprop",
    "scale_by_ademamix": "ademamix",
    "scale_by_adopt": "adopt",
    "scale_by_cocob": "cocob",
    "scale_by_galore": "galore",
    "scale_by_madgrad": "madgrad",
    "scale_by_muon": "muon",
    "scale_by_simplified_ademamix": "simplified_ademamix",
    "trace": "sgd",
    "scale": "sgd",
    "ema": "chain",
    "add_decayed_weights": "adamw",
    "scale_by_lbfgs": "lbfgs without a search",
    "scale_by_zoom_linesearch": "lbfgs",
    "hutchinson_estimator_diag_hessian": "sophia",
    "add_noise": "noisy_sgd",
    "masked": "adamw",
    "scale_by_stddev": "rmsprop",
    "scale_by_polyak": "polyak_sgd",
    "clip_by_global_norm": "chain",
    "with_extra_args_support": "chain",
}
