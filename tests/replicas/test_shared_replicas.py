"""Processes that share a replica compare their samples: in-memory processes."""

import jax.numpy as jnp
import msgspec
import pytest

from jdp.replicas import agreement, host_copies, shared_replicas
from tests import harness
from tests.replicas import comparison_fuzz


def _compare(make, n=3):
    def run(world):
        comparison_fuzz.share_replica(world)
        batches = (make(world.process_index),)
        return shared_replicas.compare_samples(world, batches, name="step")

    return harness.run_threads(run, n)


def test_the_same_samples_pass():
    assert _compare(lambda p: {"x": jnp.arange(4), "y": jnp.ones(2)}) == [None] * 3


def test_other_samples_are_named_on_all_processes():
    found = _compare(lambda p: {"x": jnp.arange(4), "y": jnp.ones(2) * (p == 2)})
    for error in found:
        assert "Processes 0 and 2 have devices of replica 0" in str(error)
        assert "`batch[0]['y']` differs" in str(error)


def test_a_leaf_that_one_process_lacks_is_a_difference():
    found = _compare(lambda p: {"x": jnp.arange(4)} | ({"y": jnp.ones(2)} if p else {}))
    for error in found:
        assert "Processes 0 and 1 have devices of replica 0" in str(error)
        assert "`batch(root)` differs" in str(error)


@pytest.mark.parametrize("replicas", [(), (1,), (0, 1), (-1,), (2**60,)])
def test_samples_of_other_replicas_are_refused(replicas):
    digest = host_copies.digest(host_copies.as_bytes(host_copies.host_copy(1.0)))

    def run(world):
        comparison_fuzz.share_replica(world)
        if world.process_index == 0:
            batch = (jnp.float32(1.0),)
            return shared_replicas.compare_samples(world, batch, name="step")
        body = msgspec.msgpack.encode({replica: [digest] for replica in replicas})
        topic = "comparison of the samples for the step `step`"
        return agreement.meet(world, topic, body, lambda _: b"")

    for error in harness.run_threads(run, 2):
        assert "The samples of process 1 are of other replicas" in str(error)
