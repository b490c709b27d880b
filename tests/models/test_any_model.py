"""Models of timm in micro form: captured, they compute what timm's do, and products have nodes."""

import json

import pytest
import torch
from families import FAMILIES, config, family
from nightly import share
from torch import nn

from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.onnx_reader.inside import find_module_outputs
from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cards.card import RunCard
from swin_quant.checkpoint import load_calibrated, load_float, save_calibrated, save_float
from swin_quant.config import from_dict
from swin_quant.models import build_model
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.fold import is_folded
from swin_quant.quant.layer import QuantConv2d
from swin_quant.quant.policy import apply_policy, enabled_nodes, load_policy, quantize
from swin_quant.quant.quantizer import Role, named_nodes

MATMULS = (Role.MATMUL_INPUT, Role.SOFTMAX_OUTPUT)


@pytest.fixture(scope="module")
def images():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(5))


def zeroed(model):
    """`model` without weights, to be read."""
    for tensor in model.state_dict().values():
        tensor.zero_()
    return model


MARKS = {
    **dict.fromkeys(("deit_tiny_patch16_224", "convnext_atto"), pytest.mark.kernels),
    "mobilenetv3_small_050": pytest.mark.nightly,  # it has all its blocks
}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS.get(name, ())) for name in FAMILIES])
def name(request):
    return request.param


def test_it_computes_what_timm_does_and_keeps_its_names(name, images, tmp_path):
    model = family(name)
    extra = {"img_size": 32} if name.startswith(("vit", "deit")) else {}
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in FAMILIES[name].items()}
    theirs = import_timm().create_model(name, num_classes=3, **options, **extra).eval()
    theirs.load_state_dict(model.state_dict())
    with torch.no_grad():
        wanted = theirs(images)
        torch.testing.assert_close(model(images), wanted)
        torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
        again = zeroed(family(name))
        load_float(again, tmp_path / "theirs.pth")
        torch.testing.assert_close(again(images), wanted)


def test_calibrated_folded_saved_and_read(name, images, tmp_path):
    model = family(name)
    with torch.no_grad():
        wanted = model(images)
        calibrate(model, [images], Method("max"))
        torch.testing.assert_close(model(images), wanted, rtol=1e-3, atol=1e-5)
        assert not any(isinstance(one, nn.BatchNorm2d) for one in model.modules())
        policy = load_policy("onnxruntime")
        apply_policy(model, policy)
        quantize(model)
        simulated = model(images)
        assert 0 < (simulated - wanted).norm() < 0.15 * wanted.norm()
        save_calibrated(model, tmp_path / "calib.pth", by_channel=True)
        other = zeroed(family(name))
        apply_policy(other, policy)
        load_calibrated(other, tmp_path / "calib.pth")
        quantize(other)
        torch.testing.assert_close(other(images), simulated)


@pytest.mark.parametrize(
    "name", share(sorted(FAMILIES.keys() - {"resnet50"}, key=lambda name: name != "resnet18"), len(FAMILIES))
)
def test_an_engine_computes_what_was_simulated(name, images, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = family(name)
    calibrate(model, [images], Method("max"))
    policy = load_policy("onnxruntime")
    apply_policy(model, policy)
    quantize(model)
    with torch.no_grad():
        simulated = model(images)
    artifact = export(
        model, RunCard(name, {}, {}, policy=policy.to_dict()), tmp_path, OnnxOptions(target="onnxruntime")
    )
    settings = onnxruntime.SessionOptions()
    settings.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(artifact.file), settings, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": images.numpy()})
    apart = (torch.from_numpy(logits) - simulated).norm() / simulated.norm()
    assert apart < 0.05, "but for levels that its sums round otherwise"
    onnx = pytest.importorskip("onnx")
    if name.startswith(("resnet", "mobilenet")):
        ran = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
        assert "QLinearConv" in ran and not {"Conv", "FusedConv", "NhwcFusedConv"} & ran, "every convolution is int8"
    graph = onnx.load(artifact.file).graph
    made_by = {output: node.op_type for node in graph.node for output in node.output}
    pools = [made_by[node.input[0]] for node in graph.node if node.op_type == "MaxPool"]
    assert pools == ["DequantizeLinear"] * name.startswith("resnet"), "OpenVINO pools int8 only behind a pair"
    if name.startswith("resnet"):
        inside = find_module_outputs(onnx.load(artifact.file), ["images"])
        assert made_by[inside["layer1.0.conv1._input_quantizer"]] == "MaxPool" and "maxpool" not in inside
        (head,) = [node for node in graph.node if "fc._input_quantizer.scale" in node.input and node.op_type[0] == "Q"]
        assert made_by[head.input[0]] == "ReduceMean", "OpenVINO averages to int8 only in front of a pair"


def test_resnet_has_a_node_at_every_product_and_addition(images):
    model = build_model(config("resnet18", layers=[2, 1, 1, 1], channels=[8, 16, 16, 16]))
    nodes = named_nodes(model)
    layers = [module for module in model.modules() if isinstance(module, QuantConv2d)]
    assert len(layers) == 15 and model.fc._input_quantizer.role is Role.ONE_SIDED_INPUT
    assert model.conv1._input_quantizer.role is Role.GEMM_INPUT
    assert model.layer2[0].conv1._input_quantizer.role is Role.ONE_SIDED_INPUT, "behind the addition and its ReLU"
    adds = {name: node.role for name, node in nodes.items() if ".add1_" in name}
    one_sided = [name for name, role in adds.items() if role is Role.ONE_SIDED_INPUT]
    assert len(adds) == 10 and one_sided == ["layer1.1.add1_right_input_quantizer"], "the shortcut, behind a ReLU"
    assert set(adds.values()) == {Role.GEMM_INPUT, Role.ONE_SIDED_INPUT}
    assert "layer1.0.add1_left_input_quantizer" in adds
    averages = {name: node.role for name, node in nodes.items() if "average" in name}
    assert averages == {"global_pool.pool.average1_input_quantizer": Role.ONE_SIDED_INPUT}, "the last addition has one"
    outputs = {name for name, node in nodes.items() if node.role is Role.CONV_OUTPUT}
    assert all(name.endswith("_aftergemm_quantizer") for name in outputs)
    for policy in ("qdq", "cpu", "tensorrt", "onnxruntime"):
        apply_policy(model, load_policy(policy))
        assert {"fc._input_quantizer", "layer1.0.add1_left_input_quantizer"} <= enabled_nodes(model).keys()


def test_the_residual_stream_of_a_transformer_stays_float_and_its_attention_does_not():
    model = family("deit_tiny_patch16_224")
    roles = {name: node.role for name, node in named_nodes(model).items()}
    block = {name.removeprefix("blocks.0."): role for name, role in roles.items() if name.startswith("blocks.0.")}
    assert [name for name, role in block.items() if role in MATMULS] == [
        f"attn.matmul{number}_{side}_input_quantizer" for number in (1, 2) for side in ("left", "right")
    ]
    assert block["attn.matmul2_left_input_quantizer"] is Role.SOFTMAX_OUTPUT
    assert block["mlp.fc2._input_quantizer"] is Role.ONE_SIDED_INPUT
    assert sum(role is Role.RESIDUAL for role in block.values()) == 4
    convnext = family("convnext_atto")
    assert {node.role for name, node in named_nodes(convnext).items() if ".add" in name} == {Role.RESIDUAL}
    assert not any("average" in name for name in named_nodes(convnext)), "what is averaged there is float"


def test_weights_fit_folded_or_not(images, tmp_path):
    model = family("resnet18")
    with torch.no_grad():
        wanted = model(images)
    save_float(model, tmp_path / "float.pth")
    calibrate(model, [images], Method("max"))
    assert is_folded(model)
    save_float(model, tmp_path / "folded.pth")
    load_float(model, tmp_path / "float.pth")
    unfolded = zeroed(family("resnet18"))
    load_float(unfolded, tmp_path / "folded.pth")
    with torch.no_grad():
        torch.testing.assert_close(model(images), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(unfolded(images), wanted, rtol=1e-4, atol=1e-5)


def test_weights_of_another_model_are_one_line(tmp_path):
    save_float(family("resnet18"), tmp_path / "float.pth")
    for name, says in (("resnet50", "does not fit the model: "), ("deit_tiny_patch16_224", "does not fit the model: ")):
        with pytest.raises(SwinQuantError, match=says) as raised:
            load_float(family(name), tmp_path / "float.pth")
        assert "\n" not in str(raised.value)
    cfg = from_dict({**_tree(), "MODEL": {**_tree()["MODEL"], "NUM_CLASSES": 5}}, "test")
    with pytest.raises(SwinQuantError, match="its head has 3 classes, MODEL.NUM_CLASSES is 5"):
        load_float(build_model(cfg), tmp_path / "float.pth")
    load_float(build_model(cfg), tmp_path / "float.pth", replace_head=True)


def _tree():
    given = {"ARCHITECTURE": "resnet18", "OPTIONS": json.dumps(FAMILIES["resnet18"])}
    return {"DATA": {"IMG_SIZE": 32}, "MODEL": {"TYPE": "timm", "NAME": "x", "NUM_CLASSES": 3, "TIMM": given}}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("resnet19", "", "timm has no such model; it has resnet1"),
        ("resnet18", "[1]", "must be a mapping in JSON"),
        ("resnet18", "{", "is not JSON"),
        ("resnet18", '{"checkpoint_path": "x.pth"}', "checkpoint_path is set elsewhere, or cannot be"),
        ("resnet18", '{"channels": [99999, 1, 1, 1]}', "channels is beyond 16384"),
        ("resnet18", '{"wings": 2}', "timm refuses MODEL.TIMM.OPTIONS"),
        ("../resnet18", "", "must be a name of timm's"),
    ],
)
def test_names_and_options_that_build_nothing(name, options, says):
    model = {"TYPE": "timm", "NUM_CLASSES": 3, "TIMM": {"ARCHITECTURE": name, "OPTIONS": options}}
    with pytest.raises(UsageError, match=says) as raised:
        build_model(from_dict({"DATA": {"IMG_SIZE": 32}, "MODEL": model}, "test"))
    assert "\n" not in str(raised.value)


def test_training_moves_norms_and_reaches_every_parameter():
    model = family("resnet18")
    before = model.bn1.running_mean.clone()
    model.train()(torch.randn(4, 3, 32, 32)).sum().backward()
    assert not torch.equal(model.bn1.running_mean, before)
    assert all(parameter.grad is not None for parameter in model.parameters())
