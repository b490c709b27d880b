"""The trained checkpoints in a checkout: they load, their cards match them, and they are small."""

from pathlib import Path

import pytest
import torch

from swin_quant.cards.lineage import card_of
from swin_quant.checkpoint import load_float
from swin_quant.config import load_config
from swin_quant.models import build_model

# Top-1 in % of models trained for minutes only; the others were trained for an hour.
LEAST = {"convnext": 60, "mobilenetv3": 57, "vit": 52}
FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.safetensors")))
def test_an_example_loads_and_its_card_is_its_own(name):
    file = FOLDER / f"{name}.safetensors"
    model = build_model(load_config(FOLDER / f"{name}.yaml"))
    source = load_float(model, file)
    card = card_of(str(file))
    assert card.checkpoint["sha256"] == source.sha256 and card.training["epochs"]
    measured = card.measured()[0]
    assert measured.precision == "float32" and measured.acc1 >= LEAST.get(name.partition("_")[0], 80)
    assert f"{measured.acc1:.2f} %" in (FOLDER / "README.md").read_text(), "documented as it was measured"
    assert file.stat().st_size <= 7e6
    assert model(torch.zeros(1, *model.input_shape)).isfinite().all()


def test_there_are_examples_of_both_versions_and_of_a_model_of_timm():
    kinds = {load_config(path).MODEL.TYPE for path in FOLDER.glob("*.yaml")}
    assert kinds == {"swin", "swinv2", "timm"}
    assert {path.name.partition("_")[0] for path in FOLDER.glob("*.yaml")} >= {"resnet", *LEAST}
