"""Whole quantized models as graphs: torch.compile without breaks, torch.export with dynamic batch."""

import pytest
import torch

from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import enabled_nodes, quantize

KINDS = pytest.mark.parametrize("kind", ["swin", "swinv2"])


@pytest.fixture(scope="module")
def quantized(tiny_model, use_policy):
    """make(kind, policy) -> a shallow quantized model: two stages, with shift, mask and merging."""

    def make(kind, policy):
        stages = {"PRETRAINED_WINDOW_SIZES": [0, 0]} if kind == "swinv2" else {}
        model = tiny_model(kind, DEPTHS=[2, 1], NUM_HEADS=[1, 2], **stages)
        calibrate(model, [torch.randn(2, 3, 32, 32)], Method("max"))
        use_policy(model, policy)
        quantize(model)
        return model

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "policy"), [("swin", "qdq"), ("swinv2", "ft-mode1")])
def test_export_serves_any_batch(kind, policy, quantized):
    model = quantized(kind, policy)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (torch.randn(2, 3, 32, 32),), dynamic_shapes=({0: batch},))
    ops = [str(node.target) for node in program.graph.nodes]
    assert sum("fake_quant" in op for op in ops) == len(enabled_nodes(model)) > 0
    exported = program.module()
    for size in (1, 3, 5):
        x = torch.randn(size, 3, 32, 32)
        with torch.no_grad():
            assert torch.equal(exported(x), model(x))


@pytest.mark.slow
@KINDS
def test_compile_makes_one_graph(kind, quantized):
    torch._dynamo.reset()
    model = quantized(kind, "ft-mode1")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
