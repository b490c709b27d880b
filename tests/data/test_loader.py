"""Batches come in the requested order, equal for any number of workers, and survive any bad picture; samples too."""

import io
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from encoded import encoded, zipped
from PIL import Image

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.data.archives import ZipPictures
from swin_quant.data.folder import FolderPictures
from swin_quant.data.loader import DrawnBatches, LoaderKilled, UnreadableLimit, default_workers, load_batches
from swin_quant.data.pictures import Pictures, UnreadablePicture
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Augment, Preprocess
from swin_quant.data.sampling import sample
from tests.helpers.refusals import refused

PREPROCESS = Preprocess(16, False, "bicubic", IMAGENET_MEAN, IMAGENET_STD)
_OPTIONS = (("auto_augment", "rand-m9-mstd0.5-inc1"), ("color_jitter", 0.4), ("re_prob", 0.25))
AUGMENT = Augment(PREPROCESS, _OPTIONS, (3,))
BATCHES = [[5, 3, 8], [0], [1, 2, 4, 6], [7]]


def png(index: int) -> bytes:
    return encoded(Image.fromarray(np.random.default_rng(index).integers(0, 256, (20, 24, 3), dtype=np.uint8)))


@pytest.fixture
def folder(tmp_path) -> Path:
    """Nine pictures in three classes; numbers 3, 4 and 7 are damaged."""
    for index in range(9):
        path = tmp_path / f"{index // 3}/{index}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes({3: b"", 4: png(4)[:300], 7: b"<html>"}.get(index, png(index)))
    return tmp_path


@pytest.fixture
def archive(tmp_path) -> Path:
    return zipped(tmp_path, {f"{index}.png": png(index) for index in range(9)})


def test_batches_are_those_asked_for_without_the_unreadable(folder):
    batches = list(load_batches(FolderPictures(folder), PREPROCESS, BATCHES))
    assert [batch.indices for batch in batches] == [[5, 8], [0], [1, 2, 6], []]
    assert [batch.unreadable for batch in batches] == [["1/3.png"], [], ["1/4.png"], ["2/7.png"]]
    assert [batch.labels.tolist() for batch in batches] == [[1, 2], [0], [0, 0, 2], []]
    assert all(batch.labels.dtype == torch.int64 and batch.images.dtype == torch.float32 for batch in batches)
    for batch in batches:
        assert batch.images.shape == (len(batch.indices), 3, 16, 16)
        for image, index in zip(batch.images, batch.indices, strict=True):
            assert torch.equal(image, PREPROCESS(Image.open(io.BytesIO(png(index)))))


@pytest.mark.parametrize("transform", [PREPROCESS, AUGMENT], ids=["evaluation", "augmented"])
def test_workers_change_no_bit(folder, transform):
    pictures = FolderPictures(folder)
    alone = list(load_batches(pictures, transform, BATCHES))
    helped = list(load_batches(pictures, transform, BATCHES, workers=2))
    for one, two in zip(alone, helped, strict=True):
        assert torch.equal(one.images, two.images) and torch.equal(one.labels, two.labels)
        assert (one.indices, one.unreadable) == (two.indices, two.unreadable)


def test_an_augmented_picture_is_the_same_in_any_batch_and_order(archive):
    pictures = ZipPictures(archive, "val")
    together = next(load_batches(pictures, AUGMENT, [[4, 2, 6]])).images
    apart = [batch.images[0] for batch in load_batches(pictures, AUGMENT, [[6], [2], [4]])]
    assert torch.equal(together, torch.stack(apart[::-1]))
    assert torch.equal(together, torch.stack([AUGMENT(pictures.read(index), index) for index in (4, 2, 6)]))


def test_workers_read_an_archive_that_the_parent_has_open(archive):
    pictures = ZipPictures(archive, "val")
    expected = torch.stack([PREPROCESS(pictures.read(index)) for index in range(9)])
    batches = load_batches(pictures, PREPROCESS, [[index] for index in range(9)], workers=2)
    assert torch.equal(torch.cat([batch.images for batch in batches]), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_that_breaks_is_one_line_and_not_a_bad_picture(archive, workers):
    pictures = ZipPictures(archive, "val")
    (archive / "val.zip").unlink()
    pictures.__dict__.update(pictures.__getstate__())  # like an unpickled copy: no open file
    with pytest.raises(SwinQuantError, match=r"^\S*val\.zip: no such file; .*$"):
        list(load_batches(pictures, PREPROCESS, [[0], [1]], workers))


class Deadly(Pictures):
    names, labels, class_names = ["a", "b"], [0, 0], ["a"]

    def open(self, index: int) -> Image.Image:
        if index:
            time.sleep(2)  # the first batch is handed over by a living process
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does to a process that took too much memory
        return Image.new("RGB", (40, 40))


def test_a_killed_worker_is_one_line_where_a_batch_is_awaited():
    batches, before = load_batches(Deadly(), PREPROCESS, [[0], [1]], workers=1), signal.getsignal(signal.SIGCHLD)
    assert next(batches).indices == [0]
    time.sleep(3)  # as a training step takes, within which torch would raise
    with pytest.raises(LoaderKilled, match=r"^a process that loads pictures was killed .*: fewer workers$"):
        next(batches)
    assert signal.getsignal(signal.SIGCHLD) is before


def test_workers_stay_within_the_cores_and_are_not_started_for_little(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    cases = {(8, 1): 8, (8, 4): 4, (8, 32): 0, (0, 1): 0, (8, 1, 80): 0, (8, 1, 50_000): 8}
    assert {case: default_workers(*case) for case in cases} == cases


def test_up_to_the_limit_pictures_may_be_unreadable():
    limit = UnreadableLimit(total=200, limit=0.01)
    limit.count(["a", "b"])
    limit.count(["b"])
    assert limit.names == ["a", "b"]
    message = refused(lambda: limit.count(["c"]), "max_unreadable (now 0.01")
    assert message.startswith("3 of 200 pictures are unreadable: a, b, c; ")


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_limit_that_is_no_share_is_refused(share):
    refused(lambda: UnreadableLimit(10, share), "max_unreadable", kind=UsageError)


TWO_PIXELS = Preprocess(2, False, "nearest", IMAGENET_MEAN, IMAGENET_STD)


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
    drawn = DrawnBatches(pictures, TWO_PIXELS, count * size, 5, size, share)
    return list(drawn), drawn.limit


def test_n_batches_of_b_pictures_and_not_one_more_is_opened():
    pictures = Numbered(40)
    found, limit = batches(pictures, 3, 4)
    assert [len(batch.images) for batch in found] == [4, 4, 4]
    assert [index for batch in found for index in batch.indices] == sample(40, 12, 5) == pictures.opened
    assert limit.names == []


@pytest.mark.parametrize(("total", "broken_places"), [(40, [0, 5, 11]), (15, [4, 5, 6]), (40, [1, 12, 13, 14])])
def test_unreadable_pictures_are_replaced_by_the_next_of_the_seeded_order(total, broken_places):
    """Also with few spare pictures, and with unreadable ones among them."""
    order = sample(total, total, 5)
    broken = [order[place] for place in broken_places]
    found, limit = batches(Numbered(total, broken), 3, 4)
    used = [index for batch in found for index in batch.indices]
    readable = [index for index in order if index not in broken]
    assert sorted(used) == sorted(readable[:12]) and len(set(used)) == 12
    assert sorted(limit.names) == sorted(f"{index}.png" for index in broken)


def test_it_comes_out_short_only_when_the_data_hold_no_more():
    found, limit = batches(Numbered(12, broken=[3, 7]), 3, 4)
    assert sum(len(batch.images) for batch in found) == 10 and len(limit.names) == 2


def test_too_many_unreadable_ones_are_an_error_that_names_them():
    with pytest.raises(SwinQuantError, match="2 of 40 pictures are unreadable: .*max_unreadable"):
        batches(Numbered(40, broken=sample(40, 2, 5)), 3, 4, share=0.04)


def test_more_pictures_than_there_are_is_refused_before_any_is_opened():
    pictures = Numbered(11)
    refused(lambda: batches(pictures, 3, 4), "12 pictures, the data holds 11", kind=UsageError)
    assert pictures.opened == []
