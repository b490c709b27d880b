"""Float8 in the file: Q/DQ and weights in that type, scales in the graph's, fake-quant's logits on ONNX Runtime."""

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from nightly import share
from onnx.numpy_helper import to_array

from swin_quant.backends import engine_loader
from swin_quant.backends.onnx.export import OnnxOptions
from swin_quant.backends.onnx.network import network
from swin_quant.base.errors import UsageError
from swin_quant.quant.layer import weighted_layers
from swin_quant.quant.policy import apply_policy, load_policy

E4M3 = ml_dtypes.float8_e4m3fn
KINDS = pytest.mark.parametrize("kind", share(["swin", "swinv2"], 2))


@pytest.mark.kernels
@pytest.mark.parametrize(("kind", "policy"), share([("swin", "tensorrt-fp8"), ("swinv2", "cuda-fp8")], 2))
def test_the_file_computes_fake_quants_logits(kind, policy, exported, run, fake_quant, images):
    """To the last bits, except where sums in another order moved values to the next level: 0.004 was measured."""
    logits = run(exported(kind, policy).file, images)["logits"]
    np.testing.assert_allclose(logits, fake_quant(kind, images, policy)[0], rtol=0, atol=0.02)


@KINDS
@pytest.mark.parametrize("options", share([{}, {"target": "tensorrt"}], 2))
def test_our_engine_runs_it_with_its_optimizations(kind, options, exported, assert_quantized_alike, images):
    artifact = exported(kind, "tensorrt-fp8", **options)
    engine = engine_loader("onnxruntime")(artifact)
    assert engine.precision == "fp8"
    assert_quantized_alike(engine(images).numpy(), kind, "tensorrt-fp8")


@KINDS
@pytest.mark.parametrize(("options", "floats"), [({}, np.float32), ({"target": "tensorrt"}, np.float16)])
def test_values_are_float8_and_scales_of_the_graphs_type(kind, options, floats, graph):
    found = graph(kind, "tensorrt-fp8", **options)
    tensors = {tensor.name: to_array(tensor) for tensor in found.initializer}
    weights = [node for node in found.node if node.op_type == "DequantizeLinear" and node.input[0] in tensors]
    pairs = [node for node in found.node if node.op_type == "QuantizeLinear"]
    assert len(weights) == 3 * 4 + 1 and len(pairs) == 3 * 8 + 1
    for node in weights:
        values, scale = tensors[node.input[0]], tensors[node.input[1]]
        assert values.dtype == E4M3 and scale.shape == values.shape[1:] and scale.dtype == floats
    for node in pairs:
        assert tensors[node.input[2]].dtype == E4M3 and not tensors[node.input[2]].astype(np.float32).any()
        assert tensors[node.input[1]].dtype == floats and tensors[node.input[1]].shape == ()
        if node.name.rpartition(".")[0].endswith("matmul_a_input_quantizer"):
            assert tensors[node.input[1]] == floats(1 / 448)


def test_weights_are_torchs_cast_of_what_was_trained(calibrated, exported):
    model, _ = calibrated("swin", "tensorrt-fp8")
    apply_policy(model, load_policy("tensorrt-fp8"))
    tensors = {t.name: to_array(t) for t in onnx.load(exported("swin", "tensorrt-fp8").file).graph.initializer}
    for name, layer in weighted_layers(model).items():
        if (stored := tensors.get(f"{name}.values")) is not None:
            scale = layer._weight_quantizer.range_for(layer.weight) / 448
            expected = (layer.weight / scale).to(torch.float8_e4m3fn).float().detach().numpy()
            np.testing.assert_array_equal(stored.astype(np.float32).T, expected)


@pytest.mark.parametrize("largest", [9e-3, 1e-3, 1e-5])
def test_a_small_row_of_q_leaves_its_layer_float16(largest, calibrated, caplog):
    """Its scale times attention's is inaccurate in float16, for which all of q, k and v used to become float32."""
    model, _ = calibrated("swin", "tensorrt-fp8")
    layer = model.get_submodule("layers.0.blocks.1.attn.qkv")
    with torch.no_grad():
        layer.weight[3] *= largest / layer.weight[3].abs().max()
    full, half = (
        network(model, OnnxOptions(float_type=floats), None).get_submodule("layers.0.blocks.1.attn.qkv")
        for floats in ("float32", "float16")
    )
    assert half.dtype == torch.float16 and "stay float32" not in caplog.text
    stored = half._weight_quantizer
    assert stored.scale[3] >= 2**-14  # normal
    values, expected = stored.values.float() * stored.scale.float(), full._weight_quantizer()
    torch.testing.assert_close(values, expected, rtol=2.0**-7, atol=2.0**-23)  # the other rows have subnormal scales
    torch.testing.assert_close(values[:, 3], expected[:, 3], rtol=2.0**-11, atol=2.0**-23)


def test_openvino_is_not_given_such_a_file(exported):
    pytest.importorskip("openvino")
    with pytest.raises(UsageError, match="openvino is not given float8"):
        engine_loader("openvino")(exported("swin", "tensorrt-fp8"))
