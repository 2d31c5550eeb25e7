"""Which operations run as one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdp.eager.coordinator.fusion import FusionItem, fuse


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], []),
        ([("a", 4), ("a", 4)], [[0, 1]]),
        ([("a", 4), ("b", 4), ("a", 4)], [[0, 2], [1]]),
        # What does not fit is passed over, and what comes after it still fits.
        ([("a", 6), ("a", 6), ("a", 4), ("a", 2)], [[0, 2], [1, 3]]),
        ([("a", 12), ("a", 4)], [[0], [1]]),
        ([(None, 1), (None, 1)], [[0], [1]]),
        ([("a", 10), ("a", 0)], [[0], [1]]),
    ],
)
def test_like_items_are_fused_up_to_the_threshold(items, expected):
    assert fuse([FusionItem(*item) for item in items], 10) == expected


def test_without_a_threshold_nothing_is_fused():
    assert fuse([FusionItem("a", 1)] * 3, 0) == [[0], [1], [2]]


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20))), st.integers(0, 30)
)
def test_everything_runs_once_and_nothing_is_too_large(items, threshold):
    items = [FusionItem(*item) for item in items]
    fused = fuse(items, threshold)
    assert sorted(i for together in fused for i in together) == list(range(len(items)))
    for together in fused:
        assert together == sorted(together)
        assert len({items[i].key for i in together}) == 1
        size = sum(items[i].num_bytes for i in together)
        assert len(together) == 1 or size <= threshold
