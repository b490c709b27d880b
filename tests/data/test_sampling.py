"""Draws are seeded and lasting, shards neither miss nor repeat items, digests show every difference."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.base.errors import UsageError
from swin_quant.data.sampling import chunks, digest, sample, shard
from tests.helpers.refusals import refused


@given(st.integers(1, 300), st.data())
def test_a_sample_has_no_repetition_and_stays_in_range(total, data):
    count, seed = data.draw(st.integers(1, total)), data.draw(st.integers(0, 2**64))
    drawn = sample(total, count, seed)
    assert len(set(drawn)) == len(drawn) == count and set(drawn) <= set(range(total))
    assert drawn == sample(total, total, seed)[:count]


def test_a_sample_is_the_same_for_years():
    assert sample(10, 10, 0) == [3, 7, 5, 2, 8, 4, 9, 1, 6, 0]  # Random(0) starts .84 .76 .42 .26 .51 .40 .78 .30
    assert sample(50_000, 3, 2024) != sample(50_000, 3, 2025)


@pytest.mark.parametrize(("count", "says"), [(0, "at least 1"), (-8, "at least 1"), (51, "asks for 51 "), (80, "50")])
def test_a_sample_of_nothing_or_of_more_than_the_data_names_the_flags_and_what_there_is(count, says):
    refused(lambda: sample(50, count, 0), "pictures ", says, kind=UsageError)


@given(st.lists(st.integers()), st.integers(1, 20))
def test_shards_of_any_world_hold_every_item_exactly_once(items, world):
    shards = [shard(range(len(items)), rank, world) for rank in range(world)]
    assert sorted(index for part in shards for index in part) == list(range(len(items)))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert shard(items, world - 1, world) == [items[index] for index in shards[world - 1]]


@given(st.lists(st.integers()), st.integers(1, 20))
def test_chunks_keep_order_and_only_the_last_is_short(indices, size):
    parts = chunks(indices, size)
    assert [index for part in parts for index in part] == indices
    assert all(len(part) == size for part in parts[:-1]) and all(parts)


def test_a_digest_sees_names_order_and_boundaries():
    assert digest(["a", "é"]) == hashlib.sha256("a\0é\0".encode()).hexdigest()
    variants = [["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"], ["ab", "c", ""], []]
    assert len({digest(names) for names in variants}) == len(variants)
