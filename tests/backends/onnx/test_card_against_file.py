"""A run card that was edited is refused where it contradicts the file, whose hash vouches for it alone."""

import json
import shutil
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import torch

import swin_quant as sq

EDITS = {
    "preprocess.mean": [0.9, 0.9, 0.9],
    "artifact.precision": "float32",
    "artifact.options.top_k": 3,
    "artifact.options.softmax": True,
    "artifact.options.uint8_input": True,
    "artifact.options.batch": 8,
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tiny_model, tiny_config):
    folder = tmp_path_factory.mktemp("edited")
    how = sq.Preprocess.from_config(tiny_config())
    model = sq.Model(tiny_model(), "tiny", preprocess=how)
    sq.calibrate(model, [torch.randn(4, 3, how.size, how.size)], "qdq", passes=[])
    return sq.export(model, "onnx", folder).file


@pytest.mark.parametrize("place", EDITS)
def test_an_edited_card_is_refused_by_its_key(exported, place, tmp_path):
    file = Path(shutil.copy(exported, tmp_path))
    *sections, key = place.split(".")
    card = json.loads(exported.with_suffix(".json").read_text())
    assert sq.artifact(exported).file == exported
    reduce(getitem, sections, card)[key] = EDITS[place]
    file.with_suffix(".json").write_text(json.dumps(card))
    with pytest.raises(sq.SwinQuantError, match=place.removesuffix(".mean")) as refusal:
        sq.artifact(file)
    assert str(refusal.value).startswith(str(file.with_suffix(".json"))) and "\n" not in str(refusal.value)
