"""Operators in the tables of compilers, and analyses of models."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from swin_quant.operators.analysis import REPLACED, SUPPORTED, UNSUPPORTED, exporter, get_status, targets
from swin_quant.operators.trace import trace, variations

ALL = ("cuda", "fastertransformer", "magicmind", "mindspore", "onnxruntime", "openvino", "tensorrt")


def test_every_row_has_a_source_that_the_table_names():
    assert tuple(targets()) == ALL
    for name, target in targets().items():
        assert target.sources, name
        assert {instead.source for instead in target.replaced.values()} <= set(target.sources), name
        lists = (*target.supported, *target.unsupported, *target.expanded, *target.replaced)
        assert len(lists) == len(set(lists)), name


def test_how_targets_take_an_operator():
    of = {name: get_status(target, "roll", "swin") for name, target in targets().items()}
    assert (of["tensorrt"].kind, of["tensorrt"].by) == (REPLACED, "Slice + Concat")
    assert of["fastertransformer"].kind == REPLACED and of["fastertransformer"].source.startswith("github")
    assert "GPU" in of["mindspore"].by and of["cuda"].kind == REPLACED
    assert get_status(targets()["fastertransformer"], "roll", None).kind == UNSUPPORTED  # for no Swin
    assert get_status(targets()["openvino"], "gelu", None).kind == SUPPORTED
    assert get_status(targets()["onnxruntime"], "hardswish", None).kind == REPLACED  # a function of other operators


def test_onnx_runtime_has_the_kernels_of_its_table():
    state = pytest.importorskip("onnxruntime.capi._pybind_state")
    has = {
        one.op_name
        for one in state.get_all_opkernel_def()
        if one.domain in ("", "ai.onnx") and one.provider == "CPUExecutionProvider"
    }
    assert set(targets()["onnxruntime"].supported) - has == {"Constant"}  # an initializer, not a kernel


EXPORTED = {
    "roll": lambda x: torch.roll(x, 1, 1),
    "layer_norm": lambda x: F.layer_norm(x, (6,), torch.ones(6), torch.zeros(6)),
    "gelu": F.gelu,
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 1),
    "clamp_min": lambda x: x.clamp_min(1e-12),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "unflatten": lambda x: x.unflatten(-1, (2, 3)),
    "index": lambda x: x[torch.tensor([[0, 1], [1, 1]])],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXPORTED)
def test_torch_writes_what_the_table_says(name):
    pytest.importorskip("onnxscript")

    class One(nn.Module):
        def forward(self, x):
            return EXPORTED[name](x)

    program = torch.onnx.export(One(), (torch.randn(2, 8, 6),), dynamo=True, verbose=False, opset_version=20)
    assert set(exporter().writes[name]) == {node.op_type for node in program.model.graph}


def test_what_varies(tiny_model):
    model = tiny_model("swin", DROP_PATH_RATE=0.1)
    shape = (1, *model.input_shape)
    batch, size, height = variations(model, shape, trace(model, shape))
    assert batch.free and batch.calls > 10 and not size.free and "layers.0.blocks.0" in size.why and not height.free
    free = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1))
    assert all(one.free for one in variations(free, (1, 3, 8, 8), trace(free, (1, 3, 8, 8))))
