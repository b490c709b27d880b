"""A publisher's names for a head's classes, and refusals of bad ones."""

import json

import pytest

from swin_quant.checkpoint.class_names import read_class_names
from swin_quant.config import from_dict
from swin_quant.data.class_names import get_english_names, list_wnids
from tests.helpers.refusals import refused

PETS = ["cat", "dog", "fox"]
BY_INDEX = {"2": "fox", "0": "cat", "1": "dog"}


@pytest.fixture
def beside(tmp_path):
    """beside(config) -> the names of `classes` classes, for weights with this config beside them."""

    def names(config, classes=3, weights="model.safetensors"):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_class_names(from_dict({"MODEL": {"NUM_CLASSES": classes}}, "test"), tmp_path / weights)

    (tmp_path / "model.safetensors").touch()
    (tmp_path / "mine.pth").touch()
    return names


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "swin", "id2label": BY_INDEX},
        {"architecture": "swin_tiny", "label_names": PETS},
        {"architecture": "swin_tiny", "pretrained_cfg": {"label_names": PETS, "tag": "in1k"}},
    ],
    ids=["transformers", "timm", "timm before"],
)
def test_names_are_in_the_order_of_the_head(beside, config):
    assert beside(config) == PETS
    assert beside(config, weights="mine.pth") == []  # the config describes other weights


def test_what_names_nothing_is_no_name(beside):
    assert beside({}) == []
    for named in (lambda n: f"LABEL_{n}", str, int):
        assert beside({"id2label": {str(n): named(n) for n in range(3)}}) == []


def test_imagenet_is_known_by_its_wnids(beside):
    wnids = list(list_wnids(1000))
    assert beside({"id2label": {str(n): get_english_names(wnid) for n, wnid in enumerate(wnids)}}, 1000) == wnids
    assert beside({"architecture": "x", "pretrained_cfg": {"tag": "ms_in22k_ft_in1k"}}, 1000) == wnids
    assert beside({"architecture": "x", "pretrained_cfg": {"tag": "mine"}}, 1000) == []
    assert beside({"architecture": "x", "pretrained_cfg": {"tag": "ms_in1k"}}, 3) == []


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"0": "cat", "2": "fox", "3": "dog"}, "[1] must be text"),
        ({"0": "cat", "1": "dog", "2": "a\x1b[2J"}, "must be at most 100,000 printable names"),
        ({"0": "cat", "1": "dog", "2": ""}, "must be at most"),
        ({"0": "cat", "1": "dog", "2": ["fox"]}, "[2] must be text"),
        ({"0": "cat", "1": "dog", "2": "x" * 10**6}, "must be at most"),
        (["cat"], "has 1 names, the head 3 classes"),
        ({str(n): "x" for n in range(10**5)}, "must be a list"),
        ("cat dog fox", "must be a list"),
    ],
    ids=["gap", "escape", "empty", "list", "long", "few", "many", "text"],
)
def test_what_is_broken_is_refused_by_its_key(beside, told, problem):
    refused(lambda: beside({"id2label": told}), "config.json: id2label", problem.replace("\\\\", "\\"))
