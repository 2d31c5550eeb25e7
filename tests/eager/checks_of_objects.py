"""Checks of objects: values of Python, parameters and optimizer states of one rank."""

import decimal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdp import eager
from tests.eager import checks_of_sets
from tests.eager.checks import Process

_OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3),
    "adagrad": lambda: optax.adagrad(0.1),
    "adadelta": lambda: optax.adadelta(0.1),
    "adafactor": lambda: optax.adafactor(1e-3),
    "adamax": lambda: optax.adamax(1e-3),
    "lamb": lambda: optax.lamb(1e-3),
    "lion": lambda: optax.lion(1e-3),
    "rmsprop": lambda: optax.rmsprop(1e-3, momentum=0.9),
    "radam": lambda: optax.radam(1e-3),
    "rates": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
}


def an_object_of_every_root_arrives(me: Process):
    for root in me.ranks:
        value = {
            "rank": me.rank,
            3: [1.5, None, True, "text", b"bytes"],
            "nested": {"list": list(range(me.rank)), -1: "minus"},
        }
        expected = {
            "rank": root,
            3: [1.5, None, True, "text", b"bytes"],
            "nested": {"list": list(range(root)), -1: "minus"},
        }
        found = eager.broadcast_object(value, root=root, name=me.name(str(root)))
        me.expect_equal(found, expected, f"{root}")
    me.expect_equal(eager.broadcast_object(None), None, "nothing")


def objects_of_all_come_in_the_order_of_ranks(me: Process):
    found = eager.all_gather_object({"rank": me.rank, 7: "x" * 100 * me.rank})
    me.expect_equal(found, [{"rank": r, 7: "x" * 100 * r} for r in me.ranks])
    me.expect_equal(eager.all_gather_object([]), [[] for _ in me.ranks])
    with checks_of_sets.added(me.ranks[::2], me.ranks[1::2]) as sets:
        mine = sets[me.rank % 2]
        found = eager.all_gather_object(me.rank, process_set=mine)
        me.expect_equal(found, list(mine.ranks), "set")
        root = mine.ranks[-1]
        found = eager.broadcast_object(me.rank, root=root, process_set=mine)
        me.expect_equal(found, root, "root of a set")


def keys_of_a_root_arrive(me: Process):
    for impl in ("threefry2x32", "rbg"):
        keys = {"one": jax.random.key(me.rank, impl=impl), "n": me.rank}
        keys["many"] = jax.random.split(keys["one"], 3)
        found = eager.broadcast_parameters(keys, root=1, name=me.name(impl))
        expected = jax.random.key(1, impl=impl)
        me.expect_equal(found["n"], 1)
        me.expect_equal(bool(found["one"] == expected), True, impl)
        many = jax.random.split(expected, 3)
        me.expect_equal(bool((found["many"] == many).all()), True, impl)
    mixed = jax.random.key(0, impl="rbg" if me.rank else "threefry2x32")
    words = ["keys of threefry2x32 at `['k']`", "keys of rbg at `['k']`"]
    me.expect_error(
        RuntimeError, words, lambda: eager.broadcast_parameters({"k": mixed})
    )
    me.expect_it_works()


def arrays_in_objects_keep_dtype_and_shape(me: Process):
    value = {
        "a": np.full((2, 0, 3), me.rank, np.float16),
        "b": jnp.full((2, 2), me.rank, jnp.bfloat16),
        "c": np.int32(me.rank),
    }
    found = eager.broadcast_object(value, root=1)
    expected = {
        "a": np.zeros((2, 0, 3), np.float16),
        "b": np.full((2, 2), 1, jnp.bfloat16),
    }
    scalar = found.pop("c")
    me.expect(found, expected)
    me.expect_equal((scalar, type(scalar)), (1, np.int32))


def sets_in_objects_come_back_as_sets(me: Process):
    value = {"a": {me.rank, 7, (1, "x")}, "b": [frozenset({2}), set()]}
    found = eager.all_gather_object(value)
    expected = [
        {"a": {rank, 7, (1, "x")}, "b": [frozenset({2}), set()]} for rank in me.ranks
    ]
    me.expect_equal(found, expected)
    me.expect_equal(type(found[0]["b"][0]), frozenset)
    me.expect_error(
        TypeError,
        ["A value of type Decimal cannot be sent", "`str(value)`"],
        lambda: eager.broadcast_object({decimal.Decimal(1)}),
    )


def what_cannot_be_sent_is_an_error_on_all_ranks(me: Process):
    loop: list = []
    loop.append(loop)
    for value, word in ((object(), "object"), (1 << 80, "int"), (loop, "")):
        bad = {"x": value} if me.rank == 1 else {"x": 1}
        me.expect_error(
            TypeError, [word], lambda b=bad: eager.broadcast_object(b, root=1)
        )
        me.expect_error(TypeError, [word], lambda b=bad: eager.all_gather_object(b))
        me.expect(eager.broadcast_object(bad if me.rank != 1 else 5, root=1), 5)
    me.expect_it_works()


def parameters_of_the_root_arrive_with_their_types(me: Process):
    params = {
        "w": np.full((2, 3), me.rank, np.float32),
        "jax": jnp.full((4,), me.rank, jnp.bfloat16),
        "step": np.int32(me.rank),
        "mask": np.array([me.rank == 2, True]),
        "options": {
            "rate": 0.5 * me.rank,
            "count": me.rank,
            "nesterov": me.rank == 2,
            "betas": (0.1 * me.rank, 0.999),
            "name": f"rank {me.rank}",
            "none": None,
        },
    }
    found = eager.broadcast_parameters(params, root=2)
    expected = {
        "w": np.full((2, 3), 2, np.float32),
        "jax": jnp.full((4,), 2, jnp.bfloat16),
        "step": np.array(2, np.int32),
        "mask": np.array([True, True]),
        "options": {
            "rate": 1.0,
            "count": 2,
            "nesterov": True,
            "betas": (0.2, 0.999),
            "name": "rank 2",
            "none": None,
        },
    }
    me.expect(found, expected)
    me.expect(eager.broadcast_parameters({}), {}, "nothing")
    me.expect(eager.broadcast_parameters({"a": 1.5}), {"a": 1.5}, "no arrays")


def the_state_of_every_optimizer_arrives(me: Process):
    params = jax.device_put({"w": np.ones((3, 2), "f4"), "b": np.zeros(2, "f4")})
    for name, make in _OPTIMIZERS.items():
        mine = make().init(params)
        ahead = jax.device_put(
            jax.tree.map(lambda x: np.asarray(x) + np.asarray(2, x.dtype), mine)
        )
        if me.rank == me.size - 1:  # The root is ahead.
            mine = ahead
        found = eager.broadcast_optimizer_state(mine, root=me.size - 1)
        me.expect(found, ahead, name)


def trees_that_differ_are_an_error_on_all_ranks(me: Process):
    a, b = np.ones(3, np.float32), np.ones((2, 2), np.float32)
    trees = (
        ({"a": a} if me.rank == 1 else {"a": a, "b": b}, ["leaves"]),
        ({"a": a} if me.rank == 1 else {"b": a}, ["trees differ", "['a']", "['b']"]),
        ({"a": 1} if me.rank == 1 else {"a": a}, ["a value", "an array", "['a']"]),
        ({"a": b} if me.rank == 1 else {"a": a}, ["shapes", "[2, 2]", "[3]"]),
    )
    for tree, words in trees:
        me.expect_error(
            RuntimeError, words, lambda t=tree: eager.broadcast_parameters(t)
        )
        me.expect_it_works()


CHECKS = (
    keys_of_a_root_arrive,
    an_object_of_every_root_arrives,
    objects_of_all_come_in_the_order_of_ranks,
    arrays_in_objects_keep_dtype_and_shape,
    sets_in_objects_come_back_as_sets,
    what_cannot_be_sent_is_an_error_on_all_ranks,
    parameters_of_the_root_arrive_with_their_types,
    the_state_of_every_optimizer_arrives,
    trees_that_differ_are_an_error_on_all_ranks,
)
