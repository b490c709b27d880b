"""Backbones as ONNX files of any height and width, and classifiers of pictures that are not square, on ONNX Runtime
and OpenVINO."""

from dataclasses import replace

import onnx
import pytest
import torch
from nightly import share
from vnni import exact_int8

from swin_quant.backends import engine_loader
from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.onnx.network import network
from swin_quant.backends.onnx.swin_maps import map_join, map_mask, map_neighbours, map_patches, map_windows
from swin_quant.backends.openvino import engine as openvino_engine
from swin_quant.base.errors import UsageError
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.maps import Cut, neighbours, patches
from swin_quant.quant.policy import dequantize, quantize
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import compare_batches

SIZES = [(32, 32), (41, 60), (9, 77), (4, 4)]
SHAPE = {"IMG_SIZE": 32, "WINDOW_SIZE": 4, "DEPTHS": [2, 1], "NUM_HEADS": [1, 2], "OUTPUT_KIND": "features"}
KINDS = [("swin", "cpu", "timm"), ("swinv2", "qdq", "detection")]


@pytest.fixture(scope="session", params=share([(kind,) for kind in KINDS], 2), ids=lambda given: given[0])
def backbone(request, calibrated):
    kind, policy, windows = request.param
    return calibrated(kind, policy, **SHAPE, WINDOWS=windows)


def loaded(artifact):
    return [engine_loader(name)(artifact) for name in ("onnxruntime", "openvino")]


def assert_alike(engines, model, images, limit):
    """The engines give what the model does, which is returned."""
    with torch.inference_mode():
        expected = model(images)
    for engine in engines:
        found = engine(images)
        assert [x.shape for x in found] == [x.shape for x in expected]
        assert not len(images) or compare_batches([found], [expected])["mean"] < limit, images.shape
    return expected


@pytest.mark.parametrize("precision", share(["int8", "float"], 2))
@exact_int8
def test_the_file_gives_the_maps_of_the_model_at_any_size(backbone, precision, tmp_path):
    model, card = backbone
    artifact = export(model, card, tmp_path, OnnxOptions(precision=precision))
    assert artifact.file.name.endswith({"int8": "_features_int8.onnx", "float": "_features_fp32.onnx"}[precision])
    graph = onnx.load(artifact.file).graph
    assert [value.name for value in graph.output] == ["features0", "features1"]
    assert any(node.op_type == "QuantizeLinear" for node in graph.node) == (precision == "int8")
    (quantize if precision == "int8" else dequantize)(model)
    engines, limit = loaded(artifact), 0.01 if precision == "int8" else 1e-5
    for size in SIZES:
        assert_alike(engines, model, torch.randn(2, 3, *size), limit)


@pytest.mark.parametrize(("window", "shift"), [((4, 4), (2, 2)), ((3, 5), (0, 2)), ((2, 4), (1, 0)), ((7, 9), (0, 0))])
def test_operators_are_the_models_own_code(window, shift):
    images, x = torch.randn(1, 3, 7, 9), torch.randn(2, 7, 9, 5)
    for pad_first in (False, True):
        cut = Cut(window, shift, pad_first)
        windows = map_windows(x, window, shift, pad_first)
        assert torch.equal(windows, cut.partition(x))
        assert torch.equal(map_join(windows, x, window, shift, pad_first), x)
    if any(shift):
        assert torch.equal(map_mask(x, window, shift), Cut(window, shift).mask(x))
        assert not map_mask(x[:, : window[0]], window, shift, rests=True).any()
    assert torch.equal(map_patches(images, 4), patches(images, 4))
    assert torch.equal(map_neighbours(x), neighbours(x))


@pytest.mark.nightly
def test_a_file_shifts_as_mmpretrain_by_the_map_in_use(calibrated, tmp_path):
    """The second map is 4 x 4, 8 x 8, 4 x 10 and 6 x 4 tokens, in windows of 4."""
    model, card = calibrated("swin", "cpu", **SHAPE | {"DEPTHS": [2, 2]}, WINDOWS="mmpretrain")
    artifact = export(model, card, tmp_path, OnnxOptions(precision="float"))
    engines, patch = loaded(artifact), model.geometry.patch_size
    dequantize(model)
    for tokens in [(8, 8), (16, 16), (8, 20), (11, 8)]:
        images = torch.randn(2, 3, *(patch * side for side in tokens))
        expected = assert_alike(engines, model, images, 1e-5)
    for block in (block for layer in model.layers for block in layer.blocks):
        block.cut = replace(block.cut, rests=False)
    with torch.inference_mode():
        assert compare_batches([model(images)], [expected])["mean"] > 1e-3  # the rule matters at this size


def test_what_cannot_be_exported_is_one_line(backbone):
    model, _ = backbone
    with pytest.raises(UsageError, match="rewrite any-size"):
        network(model, OnnxOptions(rewrites=frozenset()), None)
    with pytest.raises(UsageError, match="float16: this architecture has no rewrites that set types"):
        network(model, OnnxOptions(precision="float", float_type="float16"), None)


# Windows that need padding; a window that is higher than the map.
PADDED, HIGH = {"IMG_SIZE": [24, 40], "WINDOW_SIZE": 4}, {"IMG_SIZE": [8, 48], "WINDOW_SIZE": 5}
OBLONG = [
    ("swin", "cpu", PADDED, {"precision": "int8", "uint8_input": True, "top_k": 3}),
    ("swin", "cpu", PADDED, {"precision": "float"}),
    ("swinv2", "qdq", HIGH, {"precision": "int8", "batch": 2}),
]


@pytest.mark.parametrize(("kind", "policy", "keys", "options"), share(OBLONG, 3), ids=lambda given: str(given)[:24])
@exact_int8
def test_a_classifier_of_pictures_that_are_not_square(kind, policy, keys, options, calibrated, tmp_path):
    (model, card), precision = calibrated(kind, policy, **keys), options["precision"]
    artifact = export(model, card, tmp_path, OnnxOptions(**options))
    sizes = [one.dim_value for one in onnx.load(artifact.file).graph.input[0].type.tensor_type.shape.dim]
    assert sizes[1:] == ([*keys["IMG_SIZE"], 3] if options.get("uint8_input") else [3, *keys["IMG_SIZE"]])
    (quantize if precision == "int8" else dequantize)(model)
    made = Preprocess.from_dict(card.preprocess)
    pixels = torch.randint(0, 256, (2, *keys["IMG_SIZE"], 3), dtype=torch.uint8)
    assert_alike(loaded(artifact), model, made.normalised(pixels), 0.02 if precision == "int8" else 1e-4)


SMALL = {"IMG_SIZE": 28, "WINDOW_SIZE": 7, "DEPTHS": [2, 1], "NUM_HEADS": [1, 2], "OUTPUT_KIND": "features"}
COMPILED = [("swin", "cpu-operators", "timm"), ("swinv2", "qdq", "detection")]


@pytest.mark.parametrize("kind, policy, windows", COMPILED, ids=["swin", "swinv2"])
def test_openvino_runs_a_backbone_of_any_size_whose_operators_are_compiled(
    kind, policy, windows, calibrated, with_operators, tmp_path
):
    model, card = calibrated(kind, policy, **SMALL, WINDOWS=windows)
    names = ("MapBranch", "Mlp", "PatchMerging", "PatchEmbedding")
    plugins = zip(("map_branch", "mlp", "patch_merging", "patch_embedding"), names, strict=True)
    options = OnnxOptions(target="openvino", plugin=tuple(f"{one}=swin_quant::{node}" for one, node in plugins))
    artifact = export(model, card, tmp_path, options)
    nodes = [node.op_type for node in onnx.load(artifact.file).graph.node if node.domain == "swin_quant"]
    assert nodes == ["PatchEmbedding", *["MapBranch", "Mlp"] * 2, "PatchMerging", "MapBranch", "Mlp"]
    own = openvino_engine.load(artifact, EngineOptions(threads=1, float_type="float32"))
    assert with_operators.name in own.details["extensions"]
    quantize(model)
    for batch, *size in [(2, 32, 32), (2, 41, 60), (1, 2, 2), (0, 9, 30)]:
        assert_alike([own], model, torch.randn(batch, 3, *size), 0.02)
