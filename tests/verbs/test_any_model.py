"""A ResNet of timm and an architecture of another package through every command, with no file of our own."""

import json

import onnx
import pytest
import torch
import yaml
from nightly import share
from vnni import exact_int8

from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.errors import UsageError
from swin_quant.cards.card import RunCard
from swin_quant.checkpoint import save_float
from swin_quant.config import default_config, load_config
from swin_quant.config.defaults import ENTRY_POINTS
from swin_quant.models import build_model
from swin_quant.quant.policy import load_policy
from swin_quant.train.optim import layers_to_head

OPTIONS = {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16]}


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """A folder with resnet.yaml and resnet.pth, random weights."""
    folder = tmp_path_factory.mktemp("resnet")
    given = {"ARCHITECTURE": "resnet18", "OPTIONS": json.dumps(OPTIONS)}
    model = {"TYPE": "timm", "NAME": "micro", "NUM_CLASSES": 3, "DROP_PATH_RATE": 0.0, "TIMM": given}
    config = folder / "resnet.yaml"
    config.write_text(yaml.safe_dump({"DATA": {"IMG_SIZE": 32}, "MODEL": model, "TEST": {"CROP": False}}))
    torch.manual_seed(0)
    made = build_model(load_config(config))
    with torch.no_grad():  # other statistics than the default, so that folding changes something
        made.train()(torch.randn(16, 3, 32, 32))
    save_float(made, folder / "resnet.pth")
    return folder


@pytest.mark.parametrize("engine", share(["onnxruntime", "openvino"], 2))
def test_calibrate_score_export_verify_finetune(resnet, run, pictures, tmp_path, engine):
    data = ("--data-path", pictures, "--device", "cpu")
    words = ("--pictures", 8, "--batch", 4, "--policy", "cpu", "--output", tmp_path)
    done = run("calibrate", resnet / "resnet.pth", "--cfg", resnet / "resnet.yaml", *words, *data).ok()
    calibrated = tmp_path / "micro_calib.pth"
    card = RunCard.read(tmp_path / "micro_calib.json")
    assert card.config["MODEL"]["TIMM"]["ARCHITECTURE"] == "resnet18"
    keys = torch.load(calibrated, weights_only=True)
    assert {"conv1.bias", "conv1._weight_quantizer._amax"} <= keys.keys() and not any("running" in key for key in keys)

    done = run("evaluate", calibrated, *data, "--half", "none", "--policy", "qdq", "tensorrt").ok()
    assert "tensorrt" in done.out
    file = run("export", calibrated, "--for", engine, "--output", tmp_path / engine).ok().out.strip()
    run("verify", file, *data).ok()
    kinds = [node.op_type for node in onnx.load(file).graph.node]
    assert kinds.count("Conv") == 13 and "BatchNormalization" not in kinds
    names = {tensor.name for tensor in onnx.load(file).graph.initializer}
    assert {"conv1._weight_quantizer.values", "layer4.0.conv2.bias"} <= names
    assert open_artifact(file).record["options"]["rewrites"] == []
    done = run("export", calibrated, "--for", "tensorrt", "--output", tmp_path / "tensorrt").ok()
    graph = onnx.load(done.out.strip()).graph
    biases = {tensor.data_type for tensor in graph.initializer if tensor.name.endswith("bias")}
    assert biases == {onnx.TensorProto.FLOAT}
    assert "float layers are float32 in this file" in done.err
    for backend in ("cuda", "fastertransformer"):
        refused = run("export", calibrated, "--for", backend, "--output", tmp_path / "new").error(2)
        assert f"--for {backend} runs Swin V1 and V2 as classifiers only" in refused
    before = kinds.count("QuantizeLinear")
    assert before < sum(node.op_type == "DequantizeLinear" for node in onnx.load(file).graph.node)

    done = run("finetune", calibrated, *data, "--output", tmp_path / "qat", "--epochs", 1, "--batch", 4, "--set",
               "amax.mode=learned", "optimizer.lr=1e-3", "augment.crop=padded", "--half", "none").ok()  # fmt: skip
    trained = RunCard.read(next((tmp_path / "qat").glob("*.json")))
    assert trained.training and {"float32", "int8"} <= {result["precision"] for result in trained.results}


@pytest.mark.nightly
def test_ranks_validate_the_model_that_is_saved(resnet, forked, pictures, tmp_path):
    """Norm statistics are averaged over both ranks, each of which has seen its own pictures."""

    def note(rank):
        from swin_quant.train import loop

        validate = loop._Run._validate

        def noted(training):
            torch.save(training.state.scored.state_dict(), tmp_path / f"rank{rank}.pth")
            return validate(training)

        loop._Run._validate = noted

    words = ("--recipe", "micro_resnet", "--epochs", 1, "--batch", 4, "--set", "ema=0", "--no-eval")
    data = ("--cfg", resnet / "resnet.yaml", "--data-path", pictures, "--device", "cpu", "--output", tmp_path)
    forked(2, "train", *data, *words, before=note, code=0)
    one, two = (torch.load(tmp_path / f"rank{rank}.pth") for rank in range(2))
    assert all(torch.equal(value, two[key]) for key, value in one.items())
    saved = torch.load(tmp_path / "micro.pth")["model"]
    assert torch.equal(saved["bn1.running_mean"], one["bn1.running_mean"])


def test_a_checkpoint_that_says_nothing_of_itself_asks_for_its_name(resnet, run, pictures):
    says = run("calibrate", resnet / "resnet.pth", "--data-path", pictures).error(1)
    assert "is no Swin classifier (its keys are conv1.weight," in says and "give --cfg timm:NAME" in says
    says = run("show", "--cfg", "timm:resnett18").error(2)
    assert "timm:resnett18: timm has no such model; it has resnet18" in says
    words = ("--cfg", "timm:resnet18", "--opts", "MODEL.NUM_CLASSES", 3, "--data-path", pictures)
    says = run("calibrate", resnet / "resnet.pth", *words).error(1)
    assert "does not fit the model" in says


@pytest.mark.nightly
def test_a_backbone_is_scored_and_learns_from_its_float_self_without_labels(resnet, run, pictures, tmp_path):
    data = ("--data-path", pictures, "--device", "cpu", "--half", "none")
    kind = ("--cfg", resnet / "resnet.yaml", "--output-kind", "features", "--policy", "cpu", "--output", tmp_path)
    run("calibrate", resnet / "resnet.pth", *kind, "--pictures", 8, "--batch", 4, *data[:-2]).ok()
    done = run("evaluate", tmp_path / "micro_calib.pth", *data, "--json", "-").ok()
    (score,) = json.loads(done.out)
    assert score["sqnr_db"] > 10 and score["policy"] == "cpu"
    recipe = ("--recipe", "micro_w8a8", "--epochs", 1, "--set", "epoch_pictures=8", "batch_size=4", "precision=O0")
    words = (*recipe, "--freeze-stages", 1, *data, "--output", tmp_path)
    assert "SQNR" in run("finetune", tmp_path / "micro_calib.pth", *words).ok().out
    trained, before = (torch.load(tmp_path / f"micro_{kind}.pth") for kind in ("qat", "calib"))
    same = {key for key, value in before.items() if torch.equal(trained[key], value)}
    assert {"conv1.weight", "layer1.0.conv1.weight"} <= same and "layer2.0.conv1.weight" not in same


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


@exact_int8
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
    due = {
        f"{part}._weight_quantizer.{what}" for part, what in (("conv", "values"), ("fc1", "values"), ("fc2", "scale"))
    }
    assert due | {"fc2.bias"} <= names


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
        (
            "MODEL.TOY.HIDDEN",
            "0",
            "toy.yaml with your MODEL.TOY.HIDDEN: MODEL.TOY.HIDDEN is 0, but must be at least 1 and at most 4096",
        ),
        ("MODEL.TOY.HIDEN", "1", "unknown key MODEL.TOY.HIDEN; did you mean MODEL.TOY.HIDDEN"),
        ("MODEL.TYPE", "toys", "MODEL.TYPE is 'toys', but must be one of swin, swinv2, timm, toy"),
    ):
        with pytest.raises(UsageError, match=says):
            load_config(toy, [key, value])


def test_training_finds_its_parts(toy):
    distance = layers_to_head(build_model(load_config(toy)))
    assert (distance["conv.weight"], distance["fc1.weight"], distance["fc2.bias"]) == (3, 2, 1)
