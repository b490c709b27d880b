"""One function opens every kind of data: missing parts are named, and the message names the helpful flag."""

from pathlib import Path

import numpy as np
import pytest
from encoded import zipped
from PIL import Image

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.config import load_config
from swin_quant.config.load import find_config
from swin_quant.data.sources import DigitsPictures, has_split, open_pictures


def folder(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(root / name)
    return root


def refusal(kind: type[SwinQuantError], *arguments, **options) -> str:
    with pytest.raises(SwinQuantError) as caught:
        open_pictures(*arguments, **options)
    assert type(caught.value) is kind
    return str(caught.value)


def test_a_path_that_is_no_folder_is_named(tmp_path):
    assert "give pictures a folder" in refusal(UsageError, "", "val")
    missing = tmp_path / "nowhere"
    assert f"{missing}: no such folder; set pictures" in refusal(SwinQuantError, str(missing), "val")
    assert "cifar10:x: no such folder; a prefix is one of wnids, ilsvrc, csv" in refusal(
        SwinQuantError, "cifar10:x", "val"
    )
    zipped(tmp_path, {"0.png": b""})
    assert "val.zip: is not a folder" in refusal(SwinQuantError, str(tmp_path / "val.zip"), "val", zip_mode=True)
    assert "cannot be read" in refusal(SwinQuantError, "x" * 5000, "val")


def test_a_missing_split_says_which_there_are(tmp_path):
    due = "neither folders nor archives: it takes train/<class>/* and val/<class>/* (docs/data.md)"
    assert due in refusal(SwinQuantError, str(tmp_path), "val")
    zipped(folder(tmp_path, "train/a/1.png", "validation/a/1.png"), {"0.png": b""}, split="test")
    message = refusal(SwinQuantError, str(tmp_path), "val")
    assert "has no folder val, nor val.zip with its map" in message and "train, validation, test.zip" in message
    assert "give split train, or put pictures into val/" in message
    assert refusal(SwinQuantError, f"{tmp_path}/train", "train").endswith(f"it holds a: give pictures {tmp_path}")
    for typo, meant in (("validatoin", "validation"), ("trian", "train"), ("tset", "test")):
        assert refusal(SwinQuantError, str(tmp_path), typo).endswith(f"; did you mean {meant}?")
    assert "has no val.zip with val_map.txt" in refusal(SwinQuantError, str(tmp_path), "val", zip_mode=True)


def test_another_number_of_classes_names_the_key_and_both_counts(tmp_path):
    folder(tmp_path, "val/a/1.png", "val/b/1.png")
    message = refusal(SwinQuantError, str(tmp_path), "val", num_classes=1000)
    assert str(tmp_path) in message and "2 classes, but MODEL.NUM_CLASSES is 1000" in message
    assert "10 classes" in refusal(SwinQuantError, "digits", "val", num_classes=1000)
    assert len(open_pictures(str(tmp_path), "val")) == 2


def test_a_single_file_has_no_other_split(tmp_path, tiny_config):
    folder(tmp_path, "1.png", "2.png")
    for name in ("train.csv", "val.csv"):
        (tmp_path / name).write_text("1.png,0\n2.png,1\n")
    asked = {"val.csv": False, "{split}.csv": True, "no_{split}.csv": False, "": True}
    for prefix in ("", "csv:"):
        for place, has in asked.items():
            cfg = tiny_config().clone()
            cfg.defrost()
            cfg.DATA.DATA_PATH, cfg.DATA.ZIP_MODE = f"{prefix}{tmp_path}/{place}", False
            assert has_split(cfg, "val") == has, (prefix, place)
    assert open_pictures(f"{tmp_path}/val.csv", "train", num_classes=2).labels == [0, 1]  # named explicitly


def test_pictures_without_classes_serve_where_labels_do_not_matter(tmp_path):
    folder(tmp_path, "1.png", "2.png")
    flat = open_pictures(str(tmp_path), "train")
    assert flat.names == ["1.png", "2.png"] and flat.labels == [-1, -1]
    assert "has no folder train" in refusal(SwinQuantError, str(tmp_path), "train", num_classes=10)
    folder(tmp_path, "train/3.png")
    assert open_pictures(str(tmp_path), "train").names == ["3.png"]
    assert "<class>/<picture>" in refusal(SwinQuantError, str(tmp_path), "train", num_classes=10)


def test_which_splits_there_are(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "val.zip").touch()
    (tmp_path / "val_map.txt").touch()
    (tmp_path / "test.zip").touch()  # its map is missing

    def config_of(place, zip_mode=False):
        keys = {"DATA.DATA_PATH": str(place), "DATA.ZIP_MODE": zip_mode}
        return load_config(find_config("swin_digits"), overrides=keys)

    def held(zip_mode):
        return [split for split in ("train", "val", "test") if has_split(config_of(tmp_path, zip_mode), split)]

    assert held(False) == ["train", "val"] and held(True) == ["val", "test"] and has_split(config_of("digits"), "val")


@pytest.fixture(scope="module")
def splits():
    return {split: DigitsPictures(split) for split in ("train", "val")}


def test_every_digit_is_in_exactly_one_split_and_four_fifths_train(splits):
    names = [*splits["train"].names, *splits["val"].names]
    assert len(names) == len(set(names)) == 1797
    assert len(splits["train"]) / 1797 == pytest.approx(0.8, abs=0.005)


def test_pictures_and_labels_are_scikit_learns(splits):
    from sklearn.datasets import load_digits  # its import would cost each worker a second

    digits = load_digits()
    for pictures in splits.values():
        for index in range(0, len(pictures), 100):
            source = int(pictures.names[index].split("/")[1])
            image = pictures.read(index)
            assert image.size == (8, 8) and image.mode == "RGB"
            assert abs(np.asarray(image)[..., 0] / 255 - digits.images[source] / 16).max() < 1 / 255
            assert pictures.labels[index] == digits.target[source]
