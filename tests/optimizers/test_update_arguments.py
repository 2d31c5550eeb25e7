"""A wrong argument is refused by the wrapper that gets it."""

import numpy as np
import optax
import pytest

import jdp

ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)
WRONG_ARGUMENTS = {
    **{
        f"{name} of a function": (
            lambda name=name, more=more: getattr(jdp, name)(optax.adam, **more),
            TypeError,
            rf"`tx` of `jdp\.{name}` must be .* the function `adam`\. "
            rf"Call it: `jdp\.{name}\(optax\.adam\(\.\.\.\)\)`",
        )
        for name, more in {
            "distributed_optimizer": {},
            "zero1": {},
            "skip_unused": {},
            "local_sgd": {"period": 2},
            "diloco": {"period": 2},
        }.items()
    },
    "a number": (lambda: jdp.zero1(0.1), TypeError, r"got 0\.1, such as `optax\.adam"),
    "outer": (
        lambda: jdp.diloco(SGD, period=10, outer=0.7),
        TypeError,
        r"`outer` of `jdp\.diloco` must be an optimizer of optax.*got 0\.7",
    ),
    "outer function": (
        lambda: jdp.diloco(SGD, period=10, outer=optax.sgd),
        TypeError,
        r"Call it: `jdp\.diloco\(\.\.\., outer=optax\.sgd\(\.\.\.\)\)`",
    ),
    "divide_by": (
        lambda: jdp.distributed_optimizer(ADAM, divide_by="avg"),
        ValueError,
        "`divide_by` must be 'weight', 'active' or 'world', got 'avg'",
    ),
    "divide_by of zero1": (
        lambda: jdp.zero1(ADAM, divide_by="avg"),
        ValueError,
        "`divide_by` must be",
    ),
    "packing": (
        lambda: jdp.distributed_optimizer(ADAM, packing="x"),
        ValueError,
        "`packing` must be 'flat' or 'tuple', got 'x'",
    ),
    "all_reduce": (
        lambda: jdp.distributed_optimizer(ADAM, all_reduce=3),
        ValueError,
        "`all_reduce` must be a function of `jdp.collectives`.*got 3",
    ),
    "halves": (
        lambda: jdp.zero1(ADAM, halves="ring"),
        TypeError,
        r"`halves` must be .*`jdp\.collectives\.RING`, or 'auto', got 'ring'",
    ),
    "period": (
        lambda: jdp.local_sgd(SGD, period=2.5),
        TypeError,
        "`period` must be an integer, a number of steps, got 2.5",
    ),
    "no period": (
        lambda: jdp.local_sgd(SGD, period=()),
        ValueError,
        "`period` must be at least 1",
    ),
    "text for a period": (
        lambda: jdp.local_sgd(SGD, period="8"),
        TypeError,
        "`period` must be an integer",
    ),
    "warmup_steps": (
        lambda: jdp.local_sgd(SGD, period=2, warmup_steps=0.5),
        TypeError,
        "`warmup_steps` must be an integer",
    ),
    "period of diloco": (
        lambda: jdp.diloco(SGD, period=2.5),
        TypeError,
        "`period` must be an integer",
    ),
    "num_fragments": (
        lambda: jdp.diloco(SGD, period=2, num_fragments=1.0),
        TypeError,
        "`num_fragments` must be an integer",
    ),
    "delay": (
        lambda: jdp.diloco(SGD, period=2, delay=0.5),
        TypeError,
        "`delay` must be an integer",
    ),
    "mixing": (
        lambda: jdp.diloco(SGD, period=2, mixing="a"),
        TypeError,
        "`mixing` must be a number or None, got 'a'",
    ),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named_when_the_wrapper_is_called(name):
    call, kind, message = WRONG_ARGUMENTS[name]
    with pytest.raises(kind, match=message):
        call()


def test_integers_of_numpy_and_objects_like_optimizers_are_taken():
    jdp.local_sgd(SGD, period=np.int64(2), warmup_steps=np.int32(1))
    jdp.diloco(SGD, period=np.int64(2), mixing=np.float32(0.5))
    jdp.zero1(optax.MultiSteps(ADAM, 2))
