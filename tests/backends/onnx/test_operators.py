"""Translations to ONNX of operators that torch's exporter lacks or writes wrongly, against torch on ONNX Runtime."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import swin_quant as sq
from swin_quant.backends.onnx.operators import translations


def run(module, inputs, **options):
    """The outputs of the module's ONNX file on ONNX Runtime."""
    program = torch.onnx.export(
        module.eval(), tuple(inputs), dynamo=True, opset_version=18, custom_translation_table=translations(18),
        verbose=False, **options,
    )  # fmt: skip
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    return session.run(None, {one.name: x.numpy() for one, x in zip(session.get_inputs(), inputs, strict=True)})


@pytest.mark.parametrize("bias", [False, True])
def test_convolutions_of_volumes_need_no_bias(bias):
    torch.manual_seed(0)
    module, x = nn.Conv3d(4, 6, (3, 1, 2), (2, 1, 1), (1, 0, 1), groups=2, bias=bias), torch.randn(2, 4, 5, 4, 6)
    with torch.no_grad():
        np.testing.assert_allclose(run(module, [x])[0], module(x).numpy(), rtol=1e-4, atol=1e-5)


class Parts(nn.Module):
    """Splits a table that does not depend on the input."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Conv2d(3, 4, 3), nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x):
        factors, offsets = (self.table * 2).split(4)
        return (self.layer(x) * factors + offsets).mean((2, 3))


def test_the_optimizer_says_nothing_of_a_split_that_it_does_not_fold(tmp_path, caplog):
    model, x = sq.wrap(Parts(), 8), torch.randn(2, 3, 8, 8)
    sq.calibrate(model, [x], "qdq", passes=[])
    run = sq.export(model, "onnx", tmp_path).load("onnxruntime")
    assert not [one.getMessage() for one in caplog.records if one.name.startswith("onnxscript")]
    with torch.inference_mode():
        torch.testing.assert_close(torch.as_tensor(run(x)), model(x), rtol=1e-3, atol=1e-3)
