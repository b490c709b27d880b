"""Calibrated models of two stages (shift, mask, merging), and their exports."""

from collections import Counter
from copy import deepcopy

import onnx
import onnxruntime
import pytest
import torch
from decibels import sqnr

from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.openvino import operators
from swin_quant.backends.saturation import saturates
from swin_quant.cards.card import RunCard
from swin_quant.data.preprocess import Preprocess
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import Rule, apply_policy, dequantize, load_policy, quantize

ZERO_POINTS = load_policy("qdq").asymmetric("*.mlp.fc2._input_quantizer", "*.attn.matmul_a_input_quantizer")
OWN = {
    "zero points": ZERO_POINTS,
    "zero point behind attention": load_policy("qdq").asymmetric("*.attn.proj._input_quantizer"),
    "softmax of one block not rounded": load_policy("qdq").off("layers.0.blocks.0.attn.matmul_a_input_quantizer"),
    "tensorrt, softmax up to 1": load_policy("tensorrt").and_then(Rule(nodes=("role:softmax_output",), amax=1.0)),
    **{
        f"cpu, weights of {bits} bits": load_policy("cpu").and_then(Rule(nodes=("role:gemm_weight",), bits=bits))
        for bits in (7, 4)
    },
    "w4a16, blocks": load_policy("w4a16").and_then(Rule(nodes=("role:gemm_weight",), block=16)),
}
SHALLOW = {"DEPTHS": [2, 1], "NUM_HEADS": [1, 2]}


@pytest.fixture(scope="session")
def calibrated(tiny_model):
    """make(kind, policy="qdq", KEY=value ...) -> a model with ranges, its policy applied, and its card.

    Policies of no file are in OWN.
    """
    made = {}

    def make(kind, policy="qdq", **keys):
        given = (kind, policy, repr(keys))
        if given not in made:
            stages = {"PRETRAINED_WINDOW_SIZES": [0, 0]} if kind == "swinv2" else {}
            model = tiny_model(kind, **{**SHALLOW, **stages, **keys})
            chosen = OWN[policy] if policy in OWN else load_policy(policy)
            images = torch.randn(4, *model.input_shape, generator=torch.Generator().manual_seed(1))
            calibrate(model, [images], Method("max"))
            apply_policy(model, chosen)
            preprocess = Preprocess(model.input_shape[1:], False, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
            made[given] = model, RunCard(f"{kind}_tiny", {}, preprocess.to_dict(), policy=chosen.to_dict())
        model, card = made[given]
        return deepcopy(model), card

    return make


@pytest.fixture(scope="session")
def exported(calibrated, tmp_path_factory):
    """make(kind, policy="qdq", option=value ...) -> the artifact; each is exported once."""
    made = {}

    def make(kind, policy="qdq", **options):
        given = (kind, policy, repr(sorted(options.items())))
        if given not in made:
            model, card = calibrated(kind, policy)
            made[given] = export(model, card, tmp_path_factory.mktemp("onnx"), OnnxOptions(**options))
        return made[given]

    return make


@pytest.fixture(scope="session")
def graph(exported):
    """make(kind, policy="qdq", option=value ...) -> the onnx.GraphProto."""
    return lambda *args, **options: onnx.load(exported(*args, **options).file).graph


@pytest.fixture(scope="session")
def run():
    """run(file or ModelProto, images, level="DISABLE_ALL", entries={}) -> outputs, by ONNX Runtime on the CPU."""

    def call(model, images, level="DISABLE_ALL", entries={}):  # noqa: B006
        content = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
        settings = onnxruntime.SessionOptions()
        settings.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
        settings.intra_op_num_threads, settings.log_severity_level = 1, 3
        for key, value in entries.items():
            settings.add_session_config_entry(key, value)
        session = onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])
        results = session.run(None, {"images": images.numpy()})
        return dict(zip([output.name for output in session.get_outputs()], results, strict=True))

    return call


@pytest.fixture
def optimized(tmp_path):
    """optimized(file) -> the graph that ONNX Runtime makes of a file on loading."""

    def load(file):
        settings = onnxruntime.SessionOptions()
        settings.optimized_model_filepath, settings.log_severity_level = str(tmp_path / "optimized.onnx"), 3
        onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
        return onnx.load(tmp_path / "optimized.onnx").graph

    return load


@pytest.fixture(scope="session")
def fake_quant(calibrated):
    """fake_quant(kind, images, policy="qdq") -> logits of the trained model in torch: quantized, and float."""

    def call(kind, images, policy="qdq"):
        model, _ = calibrated(kind, policy)
        with torch.no_grad():
            quantize(model)
            quantized = model(images).numpy()
            dequantize(model)
            return quantized, model(images).numpy()

    return call


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32)


@pytest.fixture
def assert_quantized_alike(fake_quant, images):
    """assert_quantized_alike(logits, kind, policy="qdq"): logits of `images` are fake-quant's, up to ties.

    A tie that rounds the other way changes later values too: the difference stays well below that between the quantized
    and the float model, but not at float32's precision.
    """

    def check(logits, kind, policy="qdq"):
        quantized, unquantized = fake_quant(kind, images, policy)
        assert sqnr(quantized, logits) > sqnr(unquantized, quantized) + 3

    return check


@pytest.fixture
def measured(with_operators, monkeypatch):
    """The operators of any transformer are faster on this kind of CPU."""
    monkeypatch.setattr(operators, "gain", lambda architecture, operator: 1.1 * (architecture == "vit"))


@pytest.fixture(scope="session")
def exact_on():
    """exact_on(engine): skip the test if 8-bit weights saturate in the engine on this CPU; see test_saturation."""

    def check(engine):
        if saturates(engine):
            pytest.skip(f"products of 8-bit weights saturate in {engine} on this CPU: test_saturation has that")

    return check


@pytest.fixture(scope="session")
def count():
    """count(graph) -> the number of operators of each type."""
    return lambda graph: Counter(node.op_type for node in graph.node)
