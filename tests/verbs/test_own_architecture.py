"""An architecture of another package is calibrated, scored, exported and run without a change to our files."""

import onnx
import pytest
import torch
import yaml
from norm_pairs import pairs_of

from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.errors import UsageError
from swin_quant.cards.card import RunCard
from swin_quant.config import default_config, load_config
from swin_quant.config.defaults import ENTRY_POINTS
from swin_quant.models import build_model
from swin_quant.quant.policy import load_policy
from swin_quant.train.optim import layers_to_head


@pytest.fixture
def toy(install, tmp_path):
    """A config and a float checkpoint whose names begin with `net.`."""
    install("toy_architecture = toy_architecture:ARCHITECTURE", ENTRY_POINTS)
    config = tmp_path / "toy.yaml"
    model = {"TYPE": "toy", "NAME": "toy", "NUM_CLASSES": 3, "TOY": {"HIDDEN": 24}}
    config.write_text(yaml.safe_dump({"DATA": {"IMG_SIZE": 16}, "MODEL": model, "TEST": {"CROP": False}}))
    state = build_model(load_config(config)).state_dict()
    torch.save({"model": {f"net.{key}": value for key, value in state.items()}}, tmp_path / "toy.pth")
    return config


@pytest.mark.slow
def test_from_a_float_checkpoint_to_onnx_runtime(toy, run, pictures, tmp_path):
    data = ("--data-path", pictures, "--device", "cpu")
    words = ("--pictures", 8, "--batch", 4, "--policy", "qdq", "--output", tmp_path)
    run("calibrate", "--cfg", toy, "--checkpoint", tmp_path / "toy.pth", *words, *data).ok()
    calibrated = tmp_path / "toy_calib.pth"
    card = RunCard.read(tmp_path / "toy_calib.json")
    assert card.config["MODEL"]["TOY"] == {"HIDDEN": 24} and "a wrapper's names" in card.source["format"]

    for backend in ("onnx", "openvino"):
        out = tmp_path / backend
        done = run("export", "--checkpoint", calibrated, "--for", backend, "--output", out).ok()
        file = done.out.strip()
        assert run("verify", file, *data).code == 0
        operators = [node.op_type for node in onnx.load(file).graph.node]
        assert operators.count("QuantizeLinear") == 3 and operators.count("DequantizeLinear") == 6
        assert open_artifact(file).record["options"]["rewrites"] == []
    names = {tensor.name for tensor in onnx.load(file).graph.initializer}
    assert {
        "conv._weight_quantizer.values",
        "fc1._weight_quantizer.values",
        "fc2._weight_quantizer.scale",
        "fc2.bias",
    } <= names


def test_options_without_rewrites_are_refused(toy, tmp_path):
    model = build_model(load_config(toy))
    card = RunCard("toy", {}, {}, policy=load_policy("qdq").to_dict())
    with pytest.raises(UsageError, match="float16: this architecture has no rewrites"):
        export(model, card, tmp_path, OnnxOptions(float_type="float16"))
    with pytest.raises(UsageError, match="no rewrite 'window-order': there are none"):
        export(model, card, tmp_path, OnnxOptions(rewrites=frozenset({"window-order"})))


def test_its_keys_are_checked_as_ours_are(toy):
    assert default_config().MODEL.TOY.HIDDEN == 16
    for key, value, says in (
        ("MODEL.TOY.HIDDEN", "many", "MODEL.TOY.HIDDEN must be a whole number, not .many."),
        ("MODEL.TOY.HIDDEN", "0", "toy.yaml: MODEL.TOY.HIDDEN is 0, but must be at least 1 and at most 4096"),
        ("MODEL.TOY.HIDEN", "1", "unknown key MODEL.TOY.HIDEN; did you mean MODEL.TOY.HIDDEN"),
        ("MODEL.TYPE", "toys", "MODEL.TYPE is 'toys', but must be one of swin, swinv2, timm, toy"),
    ):
        with pytest.raises(UsageError, match=says):
            load_config(toy, [key, value])


def test_training_and_passes_find_its_parts(toy):
    model = build_model(load_config(toy))
    distance = layers_to_head(model)
    assert (distance["conv.weight"], distance["fc1.weight"], distance["fc2.bias"]) == (3, 2, 1)
    assert pairs_of(model) == {"norm": ("fc1",)}
