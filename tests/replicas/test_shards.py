"""Shards: every sample belongs to one process, in an order that any job finds again."""

import itertools
import pickle

import numpy as np
import pytest

import jdp
from jdp.replicas import permutation, sharding
from jdp.replicas.shards import Seat
from tests import harness

SIZES = [0, 1, 2, 5, 7, 8, 100]


def _shards(num_processes, data, **options):
    return [
        sharding.shard(Seat(p, num_processes), data, **options)
        for p in range(num_processes)
    ]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_samples", SIZES)
def test_each_sample_belongs_to_one_process(num_samples, shuffle):
    for num_processes in (1, 2, 3, 8):
        shards = _shards(num_processes, num_samples, shuffle=shuffle, seed=3)
        found = [list(shard) for shard in shards]
        assert sorted(itertools.chain(*found)) == list(range(num_samples))
        assert [len(shard) for shard in shards] == list(map(len, found))
        assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("num_samples", SIZES)
def test_what_does_not_divide_is_left_out_on_request(num_samples):
    for num_processes in (1, 2, 3, 8):
        shards = _shards(num_processes, num_samples, drop_last=True)
        found = [list(shard) for shard in shards]
        each = num_samples // num_processes
        assert [len(shard) for shard in shards] == [each] * num_processes
        assert len(set(itertools.chain(*found))) == each * num_processes


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_processes", [2, 4])
def test_a_batch_of_all_processes_is_that_of_one(num_processes, drop_last):
    options = {"seed": 5, "drop_last": drop_last}
    (alone,) = _shards(1, 50, **options)
    alone = list(alone.batches(8))
    shards = _shards(num_processes, 50, **options)
    parts = itertools.zip_longest(*(shard.batches(8) for shard in shards), fillvalue=[])
    together = [np.concatenate(part) for part in parts]
    assert len(alone) == len(together) == (6 if drop_last else 7)
    assert [len(batch) for batch in alone] == [8] * 6 + [2] * (not drop_last)
    for one, all_of_them in zip(alone, together, strict=True):
        assert set(one) == set(all_of_them) and len(one) == len(all_of_them)
    for shard in shards:
        assert shard.num_batches(8) == len(alone)


def test_each_epoch_and_each_seed_has_its_own_order():
    orders = set()
    for seed, epoch in itertools.product(range(3), range(3)):
        (shard,) = _shards(1, 20, seed=seed)
        shard.set_epoch(epoch)
        orders.add(tuple(shard))
        assert list(shard) == list(shard) == shard.indices().tolist()
    assert len(orders) == 9
    (shard,) = _shards(1, 20, shuffle=False)
    shard.set_epoch(4)
    assert list(shard) == list(range(20))


def test_an_order_is_the_same_in_every_version():
    found = permutation.find_samples(np.arange(10), 10, (0, 0))
    assert found.tolist() == [9, 3, 7, 2, 6, 1, 0, 8, 4, 5]
    found = permutation.find_samples(np.arange(3), 10**12, (3, 4))
    assert found.tolist() == [189371724977, 488301817869, 503336276305]


def test_orders_are_as_random_as_orders_drawn_evenly():
    num_orders = 1200
    counts = np.zeros((5, 5))
    orders = set()
    for seed in range(num_orders):
        found = permutation.find_samples(np.arange(5), 5, (seed, 1))
        counts[np.arange(5), found] += 1
        orders.add(tuple(found))
    assert len(orders) == 120  # of 5!, each expected 10 times.
    expected = num_orders / 5
    # Chi-squared with 16 degrees of freedom: above 39.3 in one of 1,000 tests.
    assert ((counts - expected) ** 2 / expected).sum() < 39.3


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_a_job_goes_on_anywhere_in_an_epoch_on_other_processes(num_processes):
    before = _shards(2, 50, seed=1)
    for shard in before:
        shard.set_epoch(2)
    used = [x for shard in before for x in itertools.islice(shard.batches(8), 3)]
    after = _shards(num_processes, 50, seed=1)
    for shard in after:
        shard.set_epoch(2, position=3 * 8)
    left = [list(shard) for shard in after]
    found = [*np.concatenate(used).tolist(), *itertools.chain(*left)]
    assert sorted(found) == list(range(50))
    assert max(map(len, left)) - min(map(len, left)) <= 1
    if num_processes == 2:
        rest = [x.tolist() for x in itertools.islice(before[1].batches(8), 3, None)]
        assert list(itertools.chain(*rest)) == left[1]


def test_what_is_being_read_does_not_change_with_the_epoch():
    (shard,) = _shards(1, 20, seed=1)
    expected = list(shard)
    batches, indices = shard.batches(5), iter(shard)
    next(batches), next(indices)
    shard.set_epoch(1)
    assert np.concatenate(list(batches)).tolist() == expected[5:]
    assert list(indices) == expected[1:]
    assert list(shard) != expected


ARRAYS = {"x": np.arange(10.0), "y": np.arange(20).reshape(10, 2)}


def test_batches_of_arrays_have_the_rows_of_this_process():
    shards = _shards(2, ARRAYS, shuffle=False)
    first, second = (next(shard.batches(4)) for shard in shards)
    np.testing.assert_array_equal(first["x"], [0, 2])
    np.testing.assert_array_equal(second["y"], [[2, 3], [6, 7]])
    (shard,) = _shards(1, (ARRAYS["x"], ARRAYS["y"]))
    x, y = next(shard.batches(10))
    np.testing.assert_array_equal(y[:, 0], 2 * x)
    (shard,) = _shards(1, ARRAYS["x"])
    assert set(next(shard.batches(10))) == set(range(10))


class _OnDisk:
    """A data set that reads as those of h5py do: increasing indices alone."""

    def __init__(self, values):
        self._values = values
        self.shape, self.dtype = values.shape, values.dtype

    def __len__(self):
        return len(self._values)

    def __getitem__(self, index):
        if np.ndim(index) and not (np.diff(index) > 0).all():
            raise TypeError("Indexing elements must be in increasing order")
        return self._values[index]


def test_data_sets_that_take_increasing_indices_alone_are_read_in_any_order():
    on_disk = {"x": _OnDisk(ARRAYS["x"]), "y": _OnDisk(ARRAYS["y"])}
    for shard, expected in zip(
        _shards(2, on_disk, seed=1), _shards(2, ARRAYS, seed=1), strict=True
    ):
        for batch, right in zip(shard.batches(4), expected.batches(4), strict=True):
            np.testing.assert_array_equal(batch["x"], right["x"])
            np.testing.assert_array_equal(batch["y"], right["y"])
        assert [s["x"] for s in shard.samples()] == list(shard)


class _Series:
    """A series of pandas: its indices are labels."""

    shape, dtype, iloc = (3,), np.dtype(int), None

    def __len__(self):
        return 3

    def __getitem__(self, label):
        return {2: 0, 1: 1, 0: 2}[label]


@pytest.mark.parametrize("data", [_Series(), {"x": np.ones(3), "y": _Series()}])
def test_what_is_indexed_by_labels_is_refused(data):
    with pytest.raises(TypeError, match=r"a _Series of pandas.*`series.to_numpy\(\)`"):
        sharding.shard(Seat(0, 1), data)


def test_samples_of_a_list_are_stacked():
    data = [{"x": np.full(2, i), "y": i} for i in range(5)]
    _, shard = _shards(2, data, shuffle=False)
    (batch,) = shard.batches(10)
    np.testing.assert_array_equal(batch["x"], [[1, 1], [3, 3]])
    np.testing.assert_array_equal(batch["y"], [1, 3])


@pytest.mark.parametrize("data", [ARRAYS, [{"x": float(i)} for i in range(10)]])
def test_a_view_has_the_samples_of_this_process(data):
    shard, _ = _shards(2, data, seed=1)
    shard.set_epoch(1, position=3)
    view = pickle.loads(pickle.dumps(shard.samples()))
    assert len(view) == len(shard) == 4
    assert [sample["x"] for sample in view] == list(shard)
    assert view[-1]["x"] == list(shard)[-1] and len(view[1:3]) == 2
    with pytest.raises(IndexError, match="There are 4 samples, got index 4"):
        view[4]
    shard.set_epoch(2)
    assert len(view) == 4


def test_an_iterable_is_dealt_out_element_by_element():
    for num_processes, drop_last in itertools.product((1, 2, 3), (False, True)):
        options = {"shuffle": False, "drop_last": drop_last}
        found = [
            list(sharding.shard(Seat(p, num_processes), iter(range(11)), **options))
            for p in range(num_processes)
        ]
        kept = 11 - 11 % num_processes if drop_last else 11
        assert found == [
            list(range(p, kept, num_processes)) for p in range(num_processes)
        ]


def test_a_generator_that_was_read_is_refused():
    shard = sharding.shard(Seat(0, 2), iter(range(6)), shuffle=False)
    assert list(shard.batches(4))[0].tolist() == [0, 2]
    for read in (lambda: list(shard), lambda: list(shard.batches(4))):
        with pytest.raises(ValueError, match="can be read once, and was read before"):
            read()
    shard = sharding.shard(Seat(0, 1), range(3).__iter__(), shuffle=False)
    assert [*zip(shard, "abc", strict=False)] == [(0, "a"), (1, "b"), (2, "c")]
    with pytest.raises(ValueError, match="Make a shard of a new one for each epoch"):
        next(iter(shard))


def test_an_endless_generator_is_read_on_in_the_next_epoch():
    shard = sharding.shard(Seat(0, 1), itertools.count(), shuffle=False)
    found = [list(itertools.islice(shard, 3)) for _ in range(2)]
    assert found == [[0, 1, 2], [3, 4, 5]]
    shard.set_epoch(1, position=2)
    with pytest.raises(ValueError, match="which can be read once"):
        next(iter(shard))


def test_batches_of_an_iterable_are_those_of_one_process():
    def elements():
        return ({"x": np.full(2, i)} for i in range(11))

    def batches(num_processes, drop_last, position):
        options = {"shuffle": False, "drop_last": drop_last}
        found = []
        for p in range(num_processes):
            shard = sharding.shard(Seat(p, num_processes), elements(), **options)
            shard.set_epoch(1, position=position)
            found.append([batch["x"][:, 0].tolist() for batch in shard.batches(4)])
        return found

    for drop_last in (False, True):
        (alone,) = batches(1, drop_last, 3)
        assert alone == [[3, 4, 5, 6], [7, 8, 9, 10]]
        (alone,) = batches(1, drop_last, 1)
        assert alone == [[1, 2, 3, 4], [5, 6, 7, 8], *[[9, 10]] * (not drop_last)]
        parts = itertools.zip_longest(*batches(2, drop_last, 1), fillvalue=[])
        assert [sorted(a + b) for a, b in parts] == alone


def _read_all(world):
    # All processes share one device.
    world.__dict__["local_devices"] = tuple(world.mesh.devices.flat)
    world.__dict__["local_replicas"] = (0,)
    shard = world.shard({"x": np.arange(21)}, seed=2)
    return [
        (batch["x"], weight)
        for batch, weight in jdp.join_batches(shard.batches(9), world=world)
    ]


def test_what_does_not_divide_is_read_once_through_join_batches():
    found = harness.run_threads(_read_all, 3)
    assert {len(batches) for batches in found} == {3}
    samples = [x[w == 1] for batches in found for x, w in batches]
    assert sorted(np.concatenate(samples)) == list(range(21))


def test_a_loader_of_torch_takes_a_shard_as_its_sampler():
    data = pytest.importorskip(
        "torch.utils.data", reason="torch is large, and optional"
    )
    dataset = [np.float32(i) for i in range(11)]
    shards = _shards(2, dataset, seed=1)
    found = []
    for shard in shards:
        loader = data.DataLoader(dataset, batch_size=2, sampler=shard)
        shard.set_epoch(3)
        assert len(loader) == 3
        found += [x for batch in loader for x in batch.tolist()]
        assert [int(x) for x in found[-len(shard) :]] == list(shard)
        viewed = data.DataLoader(shard.samples(), batch_size=2)
        assert [int(x) for batch in viewed for x in batch] == list(shard)
    assert sorted(found) == list(range(11))


def test_grain_reads_the_samples_of_a_shard():
    grain = pytest.importorskip("grain", reason="an extra of the examples")
    found = []
    for shard in _shards(2, [np.int64(i) for i in range(11)], seed=1):
        dataset = grain.MapDataset.source(shard.samples()).map(lambda x: x + 100)
        batches = list(dataset.batch(2).to_iter_dataset())
        assert np.concatenate(batches).tolist() == [x + 100 for x in shard]
        found += np.concatenate(batches).tolist()
    assert sorted(found) == list(range(100, 111))


def test_a_world_shards_for_its_process():
    world = harness.local_world(2)
    assert sorted(world.shard(5)) == list(range(5))
    assert isinstance(world.shard(np.int64(5)), jdp.Shard)
    assert isinstance(world.shard(iter([1]), shuffle=False), jdp.StreamShard)


BAD = {
    "`batch_size` is the number of samples of all processes .* 2, got 3": lambda: (
        sharding.shard(Seat(0, 2), 5).batches(3)
    ),
    "`batch_size` must be at least 1, got 0": lambda: sharding.shard(
        Seat(0, 2), 5
    ).num_batches(0),
    "`position` must be at most 5, the samples of an epoch, got 6": lambda: (
        sharding.shard(Seat(0, 1), 5).set_epoch(0, 6)
    ),
    "`epoch` must be at least 0, got -1": lambda: sharding.shard(
        Seat(0, 1), iter([]), shuffle=False
    ).set_epoch(-1),
    "`seed` must be at least 0, got -1": lambda: sharding.shard(Seat(0, 1), 5, seed=-1),
    "`data` must be at least 0, got -1": lambda: sharding.shard(Seat(0, 1), -1),
    "`data` is a generator, which has no indices.*`shuffle=False`": lambda: (
        sharding.shard(Seat(0, 1), (x for x in "ab"))
    ),
    r"first dimension, one row per sample, got `\['x'\]` 2, `\['y'\]` 3": lambda: (
        sharding.shard(Seat(0, 1), {"x": np.ones(2), "y": np.ones(3)})
    ),
    "one row per sample, got no leaf": lambda: sharding.shard(Seat(0, 1), {}),
}


@pytest.mark.parametrize("message", BAD)
def test_a_wrong_value_is_named(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


BAD_TYPES = {
    r"The leaf `\['n'\]` of `data` is a int, not an array": lambda: sharding.shard(
        Seat(0, 1), {"n": 3}
    ),
    "`data` must be a number of samples, arrays, .*got object": lambda: sharding.shard(
        Seat(0, 1), object()
    ),
    "`shuffle` must be True or False, got 1": lambda: sharding.shard(
        Seat(0, 1), 5, shuffle=1
    ),
    "`data` must be an integer, got True": lambda: sharding.shard(Seat(0, 1), True),
    "There are no samples to view: the shard was made of their number": lambda: (
        sharding.shard(Seat(0, 1), 5).samples()
    ),
}


@pytest.mark.parametrize("message", BAD_TYPES)
def test_a_wrong_type_is_named(message):
    with pytest.raises(TypeError, match=message):
        BAD_TYPES[message]()


@pytest.mark.parametrize("drop_last", [False, True])
def test_with_shards_a_sample_is_at_one_place_of_a_batch(drop_last):
    data = np.arange(30)

    def batches(num_processes):
        """The batches of all processes, each filled up to its block."""
        whole = []
        for process in range(num_processes):
            seat = Seat(process, num_processes, 8)
            shard = sharding.shard(seat, data, seed=3, drop_last=drop_last)
            shard.set_epoch(2, position=2)
            block = 8 // num_processes
            rows = np.full((4, block), -1)
            for row, batch in zip(rows, shard.batches(8), strict=False):
                row[: len(batch)] = batch
            whole.append(rows)
        return np.concatenate(whole, axis=1)

    alone = batches(1)
    assert len(set(alone[alone >= 0].tolist())) == (24 if drop_last else 28)
    for num_processes in (2, 4):
        np.testing.assert_array_equal(batches(num_processes), alone)
