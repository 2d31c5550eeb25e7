"""The coordinator's sums, whatever is late; see `coordinator_simulation`."""

import msgspec
import pytest

from jdp.eager.coordinator import broken_groups, coordinator
from jdp.eager.coordinator.cache_hits import Hits
from jdp.eager.coordinator.cache_slots import bits
from jdp.eager.coordinator.coordinator import Coordinator
from jdp.eager.response_cache import ResponseCache
from tests import rarely
from tests.eager import coordinator_simulation


@pytest.mark.parametrize("seed", rarely.cases(range(3), often=(2,)))
def test_every_sum_is_right_and_no_name_is_lost(seed):
    done, sums = coordinator_simulation.simulate(1500, seed, per_job=500)
    assert done >= 1500 and sums > 100


def _keep_data_of_retired_slots(monkeypatch):
    """Tensors are kept by slot, whatever that stands for by now."""
    monkeypatch.setattr(
        coordinator,
        "match_tensors",
        lambda rank, hits, message, slots: zip(bits(hits), message.data, strict=True),
    )


def _keep_data_of_slots_taken_back(monkeypatch):
    drop = Hits.drop

    def keep(self, slot):
        kept = [data.get(slot) for data in self._data]
        ranks = drop(self, slot)
        for data, tensor in zip(self._data, kept, strict=True):
            if tensor is not None:
                data[slot] = tensor
        return ranks

    monkeypatch.setattr(Hits, "drop", keep)


def _keep_data_that_one_rank_did_not_send(monkeypatch):
    """What is reduced otherwise leaves tensors behind."""
    take = Hits.take

    def keep(self, ranks, ready):
        before = [dict(data) for data in self._data]
        taken = take(self, ranks, ready)
        for data, kept in zip(self._data, before, strict=True):
            data |= {s: kept[s] for s in bits(ready) if s in kept and s not in taken}
        return taken

    monkeypatch.setattr(Hits, "take", keep)


def _drop_responses_after_the_carried(monkeypatch):
    apply = ResponseCache.apply

    def drop(self, batch):
        whole = apply(self, batch)
        num = max((i for i, data in enumerate(batch.data) if data), default=-1) + 1
        return whole[:num] if num else whole

    monkeypatch.setattr(ResponseCache, "apply", drop)


def _reuse_slots_at_once(monkeypatch):
    """Bits of the last owner count for the next one."""
    give = coordinator_simulation.Coordinator._give_slot

    def hurry(self, ready, num_seen):
        return give(self, ready, 1 << 40)

    monkeypatch.setattr(Coordinator, "_give_slot", hurry)


def _leave_torn_groups(monkeypatch):
    """Groups of which ranks have other leaves wait for ever."""
    monkeypatch.setattr(broken_groups, "_find_torn", lambda *parts: iter(()))


def _tear_groups_at_the_first_leaves(monkeypatch):
    """Groups fail before all ranks have come."""
    monkeypatch.setattr(Hits, "find_ranks", lambda self, slots: (1 << 8) - 1)


def _run_what_ranks_that_have_joined_have_not(monkeypatch):
    """Groups run whatever leaves a rank has that has joined."""
    monkeypatch.setattr(broken_groups, "has_more", lambda *parts: False)


def _let_errors_be_for_all_ranks(monkeypatch):
    """An error takes requests that a rank has not sent, or that are on their way."""
    apply = ResponseCache.apply

    def widen(self, batch):
        return [msgspec.structs.replace(r, ranks=()) for r in apply(self, batch)]

    monkeypatch.setattr(ResponseCache, "apply", widen)


@pytest.mark.parametrize(
    "defect",
    [
        _let_errors_be_for_all_ranks,
        pytest.param(_run_what_ranks_that_have_joined_have_not, marks=pytest.mark.slow),
        _leave_torn_groups,
        _tear_groups_at_the_first_leaves,
        _keep_data_of_retired_slots,
        pytest.param(_keep_data_of_slots_taken_back, marks=pytest.mark.slow),
        _keep_data_that_one_rank_did_not_send,
        _drop_responses_after_the_carried,
        _reuse_slots_at_once,
    ],
)
def test_the_simulation_finds_a_coordinator_that_is_wrong(monkeypatch, defect):
    defect(monkeypatch)
    # By its sums alone.
    monkeypatch.setattr(Hits, "slots_with_data", lambda self, rank: set())
    with pytest.raises(coordinator_simulation.Wrong):
        coordinator_simulation.simulate(30_000, 5, per_job=500)
