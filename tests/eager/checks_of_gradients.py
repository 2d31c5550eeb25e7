"""Checks of gradients: what `jax.grad` makes of a collective, by Horovod's rules."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from jdp import eager
from jdp.eager import session
from tests import harness
from tests.eager import checks_of_sets
from tests.eager.checks import Process


def _gradient(me: Process, fn, x, weights=None):
    """Of the sum of what `fn` gives, times `weights`."""

    def loss(x):
        y = fn(x)
        return jnp.sum(y if weights is None else y * weights)

    return np.array(jax.grad(loss)(jnp.asarray(x)))


def without_a_name_they_are_counted_with_the_calls_of_their_set(me: Process):
    x = np.ones(2, np.float32)
    with checks_of_sets.added(me.ranks[:2], me.ranks[1:]) as sets:
        for mine in sets:
            if mine.included():
                for call in (eager.all_reduce, eager.grouped_all_reduce):
                    found = _gradient(
                        me,
                        lambda x, s=mine, c=call: c(x, op="sum", process_set=s),
                        x,
                    )
                    expected = np.full(2, len(mine.ranks), np.float32)
                    me.expect(found, expected, f"{call.__name__} of {mine}")
        # Some have counted in one set, and some in two.
        found = _gradient(me, lambda x: eager.all_reduce(x, op="sum"), x)
        me.expect(found, np.full(2, me.size, np.float32), "of all")
    # One that is under way has a name of its own.
    if me.rank == 0:
        time.sleep(0.2)
    handle = eager.all_reduce_async(np.full(2, 5.0), op="sum")
    found = _gradient(me, lambda x: eager.all_reduce(x, op="sum"), x)
    me.expect(found, np.full(2, me.size, np.float32), "beside another one")
    me.expect(eager.synchronize(handle), np.full(2, 5.0 * me.size), "the other one")


def of_a_sum_it_is_summed_and_of_an_average_averaged(me: Process):
    x = np.arange(6, dtype=np.float32).reshape(2, 3) + me.rank
    for op, factor in (("sum", me.size), ("average", 1)):
        found = _gradient(me, lambda x, o=op: eager.all_reduce(x, op=o), x)
        me.expect(found, np.full((2, 3), factor, np.float32), op)
    # What comes back differs from rank to rank.
    for op, expected in (("sum", sum(me.ranks)), ("average", sum(me.ranks) / me.size)):
        found = _gradient(
            me, lambda x, o=op: eager.all_reduce(x, op=o, name=me.name(o)), x, me.rank
        )
        me.expect(found, np.full((2, 3), expected, np.float32), f"weighted {op}")


def of_a_scaled_sum_it_is_scaled_too(me: Process):
    x = np.ones(3, np.float32)
    found = _gradient(
        me, lambda x: eager.all_reduce(x, op="sum", prescale=3.0, postscale=0.5), x
    )
    me.expect(found, np.full(3, 1.5 * me.size, np.float32))


def on_a_set_the_ranks_of_the_set_count(me: Process):
    with checks_of_sets.added(me.ranks[:3], me.ranks[3:]) as sets:
        mine = sets[me.rank // 3]
        x = np.ones(4, np.float32)
        for op, factor in (("sum", len(mine.ranks)), ("average", 1)):
            found = _gradient(
                me,
                lambda x, o=op: eager.all_reduce(
                    x, op=o, name=me.name(o), process_set=mine
                ),
                x,
            )
            me.expect(found, np.full(4, factor, np.float32), op, ulps=2)
        found = _gradient(
            me,
            lambda x: eager.all_gather(x, name=me.name("gather"), process_set=mine),
            x,
            np.repeat(np.array(mine.ranks, np.float32), 4),
        )
        me.expect(found, np.full(4, me.rank, np.float32), "gather", ulps=2)


def of_a_gather_it_is_the_average_of_the_own_rows(me: Process):
    rows = [3, 2, 7, 4][: me.size]
    upstream = np.repeat(np.arange(me.size, dtype=np.float32), rows)[:, None]
    found = _gradient(
        me,
        lambda x: eager.all_gather(x, name=me.name()),
        np.ones((rows[me.rank], 2), np.float32),
        upstream,
    )
    me.expect(found, np.full((rows[me.rank], 2), me.rank, np.float32))
    found = _gradient(me, eager.all_gather, np.ones((2, 2), np.float32), me.rank)
    mean = np.float32(sum(me.ranks) / me.size)
    me.expect(found, np.full((2, 2), mean), "differs")


def of_a_broadcast_it_goes_to_the_root(me: Process):
    for root in me.ranks:
        found = _gradient(
            me,
            lambda x, r=root: eager.broadcast(x, root=r, name=me.name(str(r))),
            np.ones((2, 3), np.float32),
        )
        me.expect(found, np.full((2, 3), me.rank == root, np.float32), f"{root}")


def of_an_exchange_it_goes_back(me: Process):
    x = np.ones((me.size, 2), np.float32)
    found = _gradient(me, lambda x: eager.all_to_all(x, name=me.name()), x)
    me.expect(found, x, "without splits")
    # Rank r sends r + 1 rows to each; the last two to nobody. Upstream is the receiver.
    splits = [me.rank + 1] * me.size
    x = np.ones((sum(splits) + 2, 2), np.float32)
    found = _gradient(
        me, lambda x: eager.all_to_all(x, splits, name=me.name("splits"))[0], x, me.rank
    )
    to = np.repeat(np.arange(me.size, dtype=np.float32), me.rank + 1)
    expected = np.concatenate([to, [0, 0]]).astype(np.float32)[:, None] * x
    me.expect(found, expected, "splits")


def of_a_scattered_sum_it_is_whole(me: Process):
    x = np.ones((2 * me.size + 1, 3), np.float32)
    for op, factor in (("sum", me.size), ("average", 1)):
        found = _gradient(
            me, lambda x, o=op: eager.reduce_scatter(x, op=o, name=me.name(o)), x
        )
        me.expect(found, factor * x, op)


def a_tree_and_what_is_beside_it_have_gradients(me: Process):
    params = {"a": np.ones(3, "f4"), "b": (np.full(2, 2.0, "f4"), np.ones((), "f4"))}

    def loss(params):
        reduced = eager.all_reduce(params, op="sum", name=me.name())
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(reduced))

    value, grads = jax.value_and_grad(loss)(jax.device_put(params))
    n = me.size
    me.expect(float(value), float(3 * n**2 + 2 * (2 * n) ** 2 + n**2))
    expected = jax.tree.map(lambda x: np.array(2 * n * n * x, x.dtype), params)
    me.expect(jax.tree.map(np.array, grads), expected)


def of_a_group_it_is_as_of_its_leaves(me: Process):
    rows = me.rank + 1
    tree = {"a": np.ones((rows, 2), "f4"), "b": [np.full((rows, 3), 2.0, "f4"), None]}
    same = {"a": np.ones((2 * me.size, 2), "f4"), "b": [np.ones(me.size + 1, "f4")]}
    for grouped, single, x in (
        (eager.grouped_all_reduce, eager.all_reduce, same),
        (eager.grouped_all_gather, eager.all_gather, tree),
        (eager.grouped_reduce_scatter, eager.reduce_scatter, same),
    ):
        kind = single.__name__

        def loss(x, call, name):
            # A number that counts has no gradient, and goes with the others.
            y = call(x | {"n": np.arange(6)}, name=name)
            return sum(jnp.sum(leaf * (me.rank + 1)) for leaf in jax.tree.leaves(y))

        found, expected = (
            jax.grad(loss)(jax.device_put(x), call, me.name(f"{kind} {i}"))
            for i, call in enumerate((grouped, single))
        )
        to_numpy = lambda x: jax.tree.map(np.array, x)  # noqa: E731
        me.expect(to_numpy(found), to_numpy(expected), kind)


def averaged_gradients_are_those_of_the_whole_batch(me: Process):
    params = harness.oracle_params()
    (batch,) = harness.oracle_batches(1)
    mine = jax.tree.map(lambda x: np.split(x, me.size)[me.rank], batch)
    grads = eager.all_reduce(jax.jit(jax.grad(harness.oracle_loss))(params, mine))
    expected = jax.jit(jax.grad(harness.oracle_loss))(params, batch)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        me.expect(bool(np.allclose(a, b, rtol=1e-5, atol=1e-6)), True)


def inside_of_jit_it_is_said_what_to_use(me: Process):
    x = jnp.ones(3)
    for call in (
        eager.all_reduce,
        eager.all_gather,
        eager.broadcast,
        eager.grouped_all_reduce,
    ):
        words = ["while JAX traces", "outside of them. Inside of `jit`, use `jdp."]
        me.expect_error(TypeError, words, lambda c=call: jax.jit(c)(x))
    me.expect_it_works()


def reductions_that_are_no_sum_have_no_derivative_and_say_so(me: Process):
    x = jnp.ones(3) + me.rank
    for op in ("min", "max", "product", "adasum"):
        for call in (eager.all_reduce, eager.grouped_all_reduce):

            def total(x, call=call, op=op):
                return call(x, op=op, name=me.name(f"{op} {call.__name__}")).sum()

            words = [f"`op={op!r}` has no derivative", me.check, "stop_gradient"]
            me.expect_error(TypeError, words, lambda t=total: jax.grad(t)(x))

    def beside(x):
        most = eager.all_reduce(x, op="max", name=me.name("beside"))
        kept = eager.all_reduce(
            jax.lax.stop_gradient(x), op="min", name=me.name("kept")
        )
        return (eager.all_reduce(x, name=me.name("loss")) * kept).sum(), most

    gradient, most = jax.grad(beside, has_aux=True)(x)
    me.expect(np.array(gradient), np.ones(3, np.float32))
    me.expect(np.array(most), np.full(3, me.size, np.float32))


def what_has_no_derivative_is_said(me: Process):
    def total(x):
        return (eager.all_reduce(x, op="sum", name=me.name()) ** 2).sum()

    def begun(x):
        return eager.synchronize(eager.all_reduce_async(x, name=me.name())).sum()

    for words, call in (
        ("none of second order", lambda: jax.grad(lambda x: jax.grad(total)(x))(1.0)),
        ("no `jax.jvp` or", lambda: jax.jvp(total, (1.0,), (1.0,))),
        ("no `jax.jvp` or", lambda: jax.jacfwd(total)(1.0)),
        ("or `jax.vmap`", lambda: jax.vmap(total)(jnp.ones(2))),
        ("`_async` have none", lambda: jax.grad(begun)(1.0)),
        ("`jax.checkpoint`", lambda: jax.grad(jax.checkpoint(total))(1.0)),
    ):
        me.expect_error(TypeError, ["while JAX traces", words], call)
    me.expect_it_works()


_OF_TREES = (
    eager.all_reduce,
    eager.all_gather,
    eager.broadcast,
    eager.reduce_scatter,
    eager.grouped_all_reduce,
    eager.grouped_all_gather,
    eager.grouped_reduce_scatter,
)


def _total(call, name):
    """Returns the sum of what a collective gives, as a function of an array."""

    def total(x):
        splits = [[1] * x.shape[0]] if call is eager.all_to_all else []
        y = call(x, *splits, name=name)
        return jnp.sum(y[0] if splits else y)

    return total


def _expect_unheard(me: Process, words, fn, what: str):
    """What `fn` calls is refused on this rank, and no other one hears of it."""
    submitted = session.current_engine().intake.submitted
    before = submitted.count
    try:
        text = f"no error, but {fn()}"
    except TypeError as error:
        text = str(error)
    me.expect_equal(words in text, True, text)
    me.expect_equal(submitted.count - before, 0, f"submitted by {what}")


def what_a_transformation_refuses_is_heard_by_nobody(me: Process):
    x = jnp.ones((me.size, 2))
    many = jnp.stack([x, x])
    for call in (*_OF_TREES, eager.all_to_all):
        for name in (None, me.name(call.__name__)):
            total = _total(call, name)
            if me.rank == 1:
                for how, fn in {
                    "jit": lambda t=total: jax.jit(t)(x),
                    "jit of grad": lambda t=total: jax.jit(jax.grad(t))(x),
                    "vmap": lambda t=total: jax.vmap(t)(many),
                    "vmap of grad": lambda t=total: jax.vmap(jax.grad(t))(many),
                    "checkpoint": lambda t=total: jax.checkpoint(t)(x),
                    "hessian": lambda t=total: jax.hessian(t)(x),
                    "jvp": lambda t=total: jax.jvp(t, (x,), (x,)),
                }.items():
                    what = f"{call.__name__} under {how}"
                    _expect_unheard(me, "while JAX traces", fn, what)
            # The right call is the one that the others wait for.
            pull = jax.vjp(total, x)[1]
            if me.rank == 1:
                fn = lambda p=pull: jax.vmap(p)(jnp.ones(2))  # noqa: E731
                what = f"the gradient of {call.__name__}"
                _expect_unheard(me, "while JAX traces", fn, what)
            me.expect_equal(pull(jnp.ones(()))[0].shape, x.shape, call.__name__)


def leaves_of_a_tree_go_together_or_not_at_all(me: Process):
    x = jnp.ones((me.size, 2))
    engine = session.current_engine()
    for call in _OF_TREES:
        is_gather = call in (eager.all_gather, eager.grouped_all_gather)

        def both(a, b, call=call):
            return call({"a": a, "b": b})

        def total(a, b, both=both):
            return sum(jnp.sum(y) for y in jax.tree.leaves(both(a, b)))

        if me.rank == 1:
            key = jax.random.key(0)
            fn = lambda t=total, k=key: jax.grad(t)(x, k)  # noqa: E731
            _expect_unheard(me, "got keys", fn, call.__name__)
        y, pull = jax.vjp(both, x, x)
        if me.rank == 1:
            many = jax.tree.map(lambda y: jnp.stack([y, y]), y["b"])
            fn = lambda p=pull, y=y, m=many: jax.vmap(  # noqa: E731
                lambda b: p({"a": y["a"], "b": b})
            )(m)
            what = f"the gradient of {call.__name__}"
            _expect_unheard(me, "while JAX traces", fn, what)
        me.expect_equal(len(pull(y)), 2)
        before = engine.intake.submitted.count
        jax.grad(total, (0, 1))(x, x)
        # There, back, and how many rows each rank has.
        me.expect_equal(
            engine.intake.submitted.count - before, 2 + is_gather, call.__name__
        )


def a_scalar_is_refused_on_all_ranks_also_under_a_derivative(me: Process):
    for call in (eager.all_gather, eager.grouped_all_gather, eager.reduce_scatter):
        for x in (jnp.ones(()), jnp.ones(()) if me.rank else jnp.ones(2)):

            def total(x, call=call):
                return jnp.sum(call(x))

            me.expect_error(RuntimeError, [], lambda t=total, x=x: jax.grad(t)(x))
        me.expect(call(np.ones(me.size, "f4")).ndim, 1, call.__name__)


def a_number_is_given_back_only_where_nothing_was_heard(me: Process):
    names = []
    for is_heard in (False, True, False):
        try:
            with session.numbered("a check", 0) as name:
                names.append(name)
                if is_heard:
                    eager.all_reduce(np.ones(1), name=me.name())
                raise ValueError("refused")
        except ValueError:
            pass
    me.expect_equal(names[0] == names[1], True, "without a word")
    me.expect_equal(names[1] == names[2], False, "once heard")


CHECKS = (
    what_a_transformation_refuses_is_heard_by_nobody,
    leaves_of_a_tree_go_together_or_not_at_all,
    a_scalar_is_refused_on_all_ranks_also_under_a_derivative,
    a_number_is_given_back_only_where_nothing_was_heard,
    without_a_name_they_are_counted_with_the_calls_of_their_set,
    of_a_sum_it_is_summed_and_of_an_average_averaged,
    of_a_scaled_sum_it_is_scaled_too,
    on_a_set_the_ranks_of_the_set_count,
    of_a_gather_it_is_the_average_of_the_own_rows,
    of_a_broadcast_it_goes_to_the_root,
    of_an_exchange_it_goes_back,
    of_a_scattered_sum_it_is_whole,
    a_tree_and_what_is_beside_it_have_gradients,
    of_a_group_it_is_as_of_its_leaves,
    reductions_that_are_no_sum_have_no_derivative_and_say_so,
    what_has_no_derivative_is_said,
    averaged_gradients_are_those_of_the_whole_batch,
    inside_of_jit_it_is_said_what_to_use,
)
