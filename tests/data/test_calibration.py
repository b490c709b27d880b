"""Calibration gets N x B readable pictures, the same ones whatever happens to some of them."""

import pytest
from PIL import Image

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.data.loader import DrawnBatches
from swin_quant.data.pictures import Pictures, UnreadablePicture
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from swin_quant.data.sampling import sample

PREPROCESS = Preprocess(2, False, "nearest", IMAGENET_MEAN, IMAGENET_STD)


class Numbered(Pictures):
    """Picture i has a single colour, i; pictures in `broken` cannot be read."""

    def __init__(self, count, broken=()):
        self.names, self.labels, self.class_names = [f"{i}.png" for i in range(count)], [0] * count, ["one"]
        self.broken, self.opened = set(broken), []

    def open(self, index):
        self.opened.append(index)
        if index in self.broken:
            raise UnreadablePicture(self.names[index])
        return Image.new("RGB", (2, 2), (index, index, index))


def batches(pictures, count, size, share=1.0):
    drawn = DrawnBatches(pictures, PREPROCESS, count * size, 5, size, share)
    return list(drawn), drawn.limit


def test_n_batches_of_b_pictures_and_not_one_more_is_opened():
    pictures = Numbered(40)
    found, limit = batches(pictures, 3, 4)
    assert [(number, len(batch.images)) for number, batch in found] == [(0, 4), (1, 4), (2, 4)]
    assert [index for _, batch in found for index in batch.indices] == sample(40, 12, 5) == pictures.opened
    assert limit.names == []


@pytest.mark.parametrize(("total", "broken_places"), [(40, [0, 5, 11]), (15, [4, 5, 6]), (40, [1, 12, 13, 14])])
def test_unreadable_pictures_are_replaced_by_the_next_of_the_seeded_order(total, broken_places):
    """Also with few spare pictures, and with unreadable ones among them."""
    order = sample(total, total, 5)
    broken = [order[place] for place in broken_places]
    found, limit = batches(Numbered(total, broken), 3, 4)
    used = [index for _, batch in found for index in batch.indices]
    readable = [index for index in order if index not in broken]
    assert sorted(used) == sorted(readable[:12]) and len(set(used)) == 12
    assert sorted(limit.names) == sorted(f"{index}.png" for index in broken)


def test_it_comes_out_short_only_when_the_data_hold_no_more():
    found, limit = batches(Numbered(12, broken=[3, 7]), 3, 4)
    assert sum(len(batch.images) for _, batch in found) == 10 and len(limit.names) == 2


def test_too_many_unreadable_ones_are_an_error_that_names_them():
    with pytest.raises(SwinQuantError, match="2 of 40 pictures are unreadable: .*max_unreadable"):
        batches(Numbered(40, broken=sample(40, 2, 5)), 3, 4, share=0.04)


def test_more_pictures_than_there_are_is_refused_before_any_is_opened():
    pictures = Numbered(11)
    with pytest.raises(UsageError, match="12 pictures, the data holds 11"):
        batches(pictures, 3, 4)
    assert pictures.opened == []
