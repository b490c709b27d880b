"""Replaced operators and plugins in exported files: the graph has them, and the file computes the same as before."""

import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from nightly import share
from operator_nodes import attended, core_with

from swin_quant.backends.onnx_reader.checks import check_scales, infer_shapes
from swin_quant.backends.onnx_reader.file import open_onnx
from swin_quant.backends.onnx_reader.inside import find_module_outputs
from swin_quant.backends.openvino import engine as openvino_engine
from swin_quant.base.errors import SwinQuantError
from swin_quant.score.options import EngineOptions

SPECS = ("roll=swin_quant::Roll", "relu=swin_quant::Relu", "layer_norm=my.domain::Norm")
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="session")
def plain(exported):
    """The file exported without plugins."""
    return exported("swinv2", precision="float")


def test_plugins_are_nodes_of_their_domain_and_the_file_runs(plain, exported, run):
    plugged = exported("swinv2", precision="float", plugin=SPECS)
    model = onnx.load(plugged.file)
    operators = {(node.domain, node.op_type) for node in model.graph.node}
    assert {("swin_quant", "Roll"), ("my.domain", "Norm")} <= operators
    assert ("", "LayerNormalization") not in operators
    (roll, *_) = [node for node in model.graph.node if node.op_type == "Roll"]
    attributes = {one.name: onnx.helper.get_attribute_value(one) for one in roll.attribute}
    assert attributes["dims"] == [1, 2] and attributes["shifts"] == [-2, -2]
    found, wanted = run(plugged.file, IMAGES)["logits"], run(plain.file, IMAGES)["logits"]
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    checked = open_onnx(plugged.file)
    assert checked.functions and checked.batch is None
    assert list(plugged.record["options"]["plugin"]) == list(SPECS)


def test_a_sum_inside_a_branch_s_operator_is_the_block_s():
    node, opsets = onnx.helper.make_node, [onnx.helper.make_opsetid(name, 17) for name in ("", "my")]
    bodies = {
        "Mlp": [node("Relu", ["x"], ["y"]), node("Add", ["x", "y"], ["z"])],
        "AttentionBranch": [node("Gather", ["x", "places"], ["y"], axis=1), node("Add", ["y", "y"], ["z"])],
        "Merging": [node("Relu", ["x"], ["y"]), node("Add", ["y", "y"], ["z"])],
    }
    functions = [
        onnx.helper.make_function("my", name, ["x", "places"], ["z"], body, opsets) for name, body in bodies.items()
    ]
    steps = {"a.attn.AttentionBranch": "images", "a.mlp.Mlp": "a.attn.AttentionBranch", "down.Merging": "a.mlp.Mlp"}
    nodes = [node(name.split(".")[-1], [x, "places"], [name], name, domain="my") for name, x in steps.items()]
    ends = [onnx.helper.make_tensor_value_info(name, 1, [1, 4]) for name in ("images", *steps)]
    places = onnx.numpy_helper.from_array(np.arange(4), "places")
    graph = onnx.helper.make_graph(nodes, "net", ends[:1], ends[-1:], [places], value_info=ends[1:-1])
    model = onnx.helper.make_model(graph, opset_imports=opsets, functions=functions)
    assert find_module_outputs(model, ["images"]) == {"a": "a.mlp.Mlp", "down": "down.Merging"}


def test_replacements_leave_their_operator_out_of_the_graph(plain, exported, run):
    replaced = exported("swinv2", precision="float", replace=("roll", "qkv_split", "gather", "reshape"))
    model = onnx.load(replaced.file)
    kinds = {node.op_type for node in model.graph.node}
    assert {"Slice", "Concat"} <= kinds and not {"GatherND", "Squeeze", "Unsqueeze"} & kinds and not model.functions
    np.testing.assert_allclose(run(replaced.file, IMAGES)["logits"], run(plain.file, IMAGES)["logits"], atol=2e-5)


@pytest.mark.parametrize("library", ["openvino", "torch"])
def test_what_builds_plugins_says_whose_library_it_misses(library, tmp_path):
    script = Path(__file__).parents[3] / "plugins" / library / "build.sh"
    folder, environment = tmp_path / "built", os.environ | {"PYTHON": "false"}
    done = subprocess.run(["bash", script, folder], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and not folder.exists()
    assert done.stderr.startswith(f"build.sh: false imports no {library}: ") and done.stderr.count("\n") == 1


ATTENDING = {  # -> the number of scales of the three attentions: one for the softmax if it is rounded
    ("swin", "qdq"): [5, 5, 5],
    ("swin", "softmax of one block not rounded"): [4, 5, 5],
    ("swinv2", "qdq"): [5, 5, 5],
    ("swinv2", "cuda"): [4, 4, 4],
}


@pytest.fixture(scope="session", params=share([(one,) for one in ATTENDING], 2), ids="-".join)
def attending(exported, request):
    """Attention in windows of 16 tokens, shifted and not: exported as plain nodes, and with the operator."""
    return exported(*request.param), exported(*request.param, plugin=("attention=swin_quant::Attention",))


def test_attention_as_one_operator_on_int8(attending, run, request):
    """q, k, v and the output are int8; the function in the file computes the same as the nodes."""
    plain, own = attending
    graph = onnx.load(own.file).graph
    nodes = [node for node in graph.node if node.op_type == "Attention"]
    scales = [next(one.floats for one in node.attribute if one.name == "scales") for node in nodes]
    assert [len(found) for found in scales] == ATTENDING[request.node.callspec.params["attending"]]
    assert all(scale > 0 for found in scales for scale in found)
    assert "Softmax" not in {node.op_type for node in graph.node}
    types = {name: node.op_type for node in graph.node for name in node.output}
    assert {types[node.input[0]] for node in nodes} == {"QuantizeLinear"}
    assert {node.op_type for node in graph.node if node.input[0] in {n.output[0] for n in nodes}} == {
        "DequantizeLinear"
    }
    difference = run(own.file, IMAGES)["logits"] - run(plain.file, IMAGES)["logits"]
    assert np.abs(difference).mean() < 0.005


@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize("length, rounds", share([(49, 4), (16, 1), (64, 1), (256, 1)], 4))
@pytest.mark.parametrize("of_softmax", [[1 / 127], [], [0.0]], ids=["rounded", "not rounded", "not rounded, before"])
def test_compiled_attention(width, length, rounds, of_softmax, library):
    """Levels are the definition's, except for values between two levels.

    Heads of 32 channels have their own kernel if the CPU has VNNI; others run anywhere. That kernel rounds exponentials
    of a softmax that is not quantized, for which older files have a scale of 0.
    """
    heads, scales = 3, [0.02, 0.03, 0.02, *of_softmax, 0.004]
    seeded = torch.Generator().manual_seed(length)
    levels = torch.randint(-128, 128, (2, rounds * length, 3 * heads * width), dtype=torch.int8, generator=seeded)
    constant = torch.randn(rounds * heads, length, length, generator=seeded)
    constant[-1, :, -5:] -= 100
    core = core_with(str(library))
    shapes = [", ".join(map(str, one.shape)) for one in (levels, constant)]
    text = f"""<ir_version: 10, opset_import: ["": 20, "swin_quant": 1]>
        one (int8[{shapes[0]}] x, float[{shapes[1]}] c) => (int8[a, b, d] y)
        {{ y = swin_quant.Attention<heads = {heads}, scales = {[float(scale) for scale in scales]}>(x, c) }}"""
    model = core.compile_model(core.read_model(onnx.parser.parse_model(text).SerializeToString()), "CPU")
    found = model([levels.numpy(), constant.numpy()])[0]
    x = levels.numpy().reshape(2, rounds, length, 3, heads, width).transpose(3, 0, 1, 4, 2, 5)
    parts, added = (one * scale for one, scale in zip(x, scales, strict=False)), constant.unflatten(0, (rounds, heads))
    wanted = attended(*parts, added.numpy(), (), [scale for scale in scales[:-1] if scale]).swapaxes(2, 3)
    wanted = np.clip(np.round(wanted.reshape(found.shape) / scales[-1]), -128, 127)
    difference = np.abs(found.astype(int) - wanted)
    rounds_all = any(of_softmax) or width != 32
    most, some = (1, 0.01) if rounds_all else (4, 0.1)  # half a level of an exponential is 1.3 levels of v here
    assert found.dtype == np.int8 and wanted.std() > 10 and difference.max() <= most and (difference > 0).mean() < some


@pytest.mark.parametrize("float_type", ["float32", "bfloat16"])
def test_openvino_runs_a_file_whose_blocks_are_two_operators(float_type, exported, with_operators, exact_on, images):
    exact_on("openvino")
    if float_type not in openvino_engine.float_types():
        pytest.skip(f"no {float_type}")
    options = EngineOptions(threads=1, float_type=float_type)
    both = {"plugin": ("attention_branch=swin_quant::AttentionBranch", "mlp=swin_quant::Mlp")}
    plain, own = (openvino_engine.load(exported("swinv2", "cpu-operators", **one), options) for one in ({}, both))
    assert with_operators.name in own.details["extensions"]
    wanted, found = plain(images), own(images)
    assert float((found - wanted).square().sum() / wanted.square().sum()) < 1e-3


@pytest.mark.parametrize("place, said", [(3, "must be finite and above zero"), (13, "its graph makes no sense")])
def test_a_scale_that_a_call_gives_to_the_function_is_checked(place, said, exported, tmp_path):
    model = onnx.load(exported("swinv2", "cpu", plugin=("mlp=swin_quant::Mlp",)).file)
    node = next(node for node in model.graph.node if node.op_type == "Mlp")
    if place < len(node.input):
        scale = next(one for one in model.graph.initializer if one.name == node.input[place])
        scale.CopyFrom(onnx.numpy_helper.from_array(np.float32(0), scale.name))
    else:
        del node.input[3:]
    with pytest.raises(SwinQuantError, match=said):
        check_scales(infer_shapes(model), tmp_path)
