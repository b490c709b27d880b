"""A set of pictures answers whether there are enough of them."""

from dataclasses import replace

from swin_quant.data.picture_set import PictureSet


def test_a_set_has_the_pictures_of_its_split_and_no_more_than_it_takes(pictures):
    val = PictureSet(str(pictures))
    assert (val.has(7), val.has(8), replace(val, split="train").has(12)) == (True, False, True)
    assert (replace(val, count=3).has(3), replace(val, count=3).has(4)) == (True, False)
