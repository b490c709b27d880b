"""The placement policy `tensorrt`, rule by rule, on the exported graph."""

import numpy as np
import onnx.numpy_helper
import pytest
from nightly import share

KINDS = pytest.mark.parametrize("kind", share(["swin", "swinv2"], 2))


class Graph:
    """The producer and the consumers of each tensor."""

    def __init__(self, graph):
        self.nodes = list(graph.node)
        self.makers = {name: node for node in graph.node for name in node.output}
        self.tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}

    def readers(self, node):
        return [other for other in self.nodes if set(other.input) & set(node.output)]

    def of(self, op_type, ending=""):
        return [
            node for node in self.nodes if node.op_type == op_type and node.name.rpartition(".")[0].endswith(ending)
        ]

    def maker(self, name):
        return self.makers[name].op_type if name in self.makers else None


@pytest.fixture
def trt(graph):
    return lambda kind, policy="tensorrt", **options: Graph(graph(kind, policy, target="tensorrt", **options))


@KINDS
def test_all_inputs_of_products_are_quantized_no_output_and_no_residual_addition(kind, trt):
    """Weights have a scale for each row, activations one."""
    found = trt(kind)
    outside = ("patch_embed.proj", "head")  # never quantized: docs/reference, section 1.4
    for product in found.of("MatMul"):
        name = product.name.rpartition(".")[0]
        expected = name not in outside
        assert [found.maker(tensor) == "DequantizeLinear" for tensor in product.input] == [expected] * 2, product.name
        assert not {"QuantizeLinear", "DequantizeLinear"} & {node.op_type for node in found.readers(product)}
    for node in found.of("DequantizeLinear"):
        is_weight = node.name.endswith("_weight_quantizer.DequantizeLinear")
        shape = found.tensors[node.input[1]].shape
        assert shape == ((found.tensors[node.input[0]].shape[1],) if is_weight else ()), node.name
        assert is_weight == (node.input[0] in found.tensors)
    sums = [node for node in found.of("Add") if node.name.rpartition(".")[0].rpartition(".")[0].endswith("blocks")]
    assert len(sums) == 6 and not any(found.maker(name) == "DequantizeLinear" for add in sums for name in add.input)


@KINDS
@pytest.mark.parametrize("policy", share(["tensorrt", "tensorrt-fp8"], 2))
def test_attention_has_the_shape_that_fuses(kind, policy, trt):
    """MatMul(DQ q, DQ k^T) + constant -> Softmax -> Q/DQ -> MatMul(., DQ v), nothing between; rank 4, scale in q."""
    found = trt(kind, policy)
    softmaxes = found.of("Softmax")
    assert len(softmaxes) == 3
    for softmax in softmaxes:
        add = found.makers[softmax.input[0]]
        product = found.makers[add.input[0]]
        assert (add.op_type, product.op_type) == ("Add", "MatMul")
        pairs = [found.makers[name] for name in product.input]
        quantizers = [found.makers[node.input[0]] for node in pairs]
        assert [node.op_type for node in (*pairs, *quantizers)] == ["DequantizeLinear"] * 2 + ["QuantizeLinear"] * 2
        # Model-Optimizer, pull request 1289: K is transposed before its pair, with no Cast in between
        assert found.maker(quantizers[1].input[0]) == "Transpose"
        constant = found.tensors[add.input[1]]
        assert constant.ndim == 3  # so logits [B, heads, L, L] have rank 4
        (quantize,) = found.readers(softmax)
        (dequantize,) = found.readers(quantize)
        (second,) = found.readers(dequantize)
        assert [node.op_type for node in (quantize, dequantize, second)] == [
            "QuantizeLinear",
            "DequantizeLinear",
            "MatMul",
        ]
        assert found.maker(second.input[1]) == "DequantizeLinear"
        steps, node = [], second  # TRT#4167: without a pair behind it TensorRT generates no fused int8 attention
        while not steps or steps[-1] in ("Transpose", "Reshape"):
            (node,) = found.readers(node)
            steps.append(node.op_type)
        assert steps[-1] == "QuantizeLinear" and node.name.rpartition(".")[0].endswith("attn.proj._input_quantizer")
    if kind == "swin":
        assert not found.of("Mul") and not found.of("Div")


@KINDS
def test_a_policy_may_fix_the_scale_behind_softmax(kind, trt):
    """Like NVIDIA's exporter: a range of 1 instead of the calibrated one, 1 / 127 in int8. All else stays."""

    def scales(found):
        return {node.name: found.tensors[node.input[1]] for node in found.nodes if node.name.endswith("eLinear")}

    calibrated, fixed = (scales(trt(kind, policy)) for policy in ("tensorrt", "tensorrt, softmax up to 1"))
    behind = {name for name in fixed if name.rpartition(".")[0].endswith("matmul_a_input_quantizer")}
    assert len(behind) == 3 * 2 and fixed.keys() == calibrated.keys()
    for name, scale in fixed.items():
        assert scale.dtype == np.float16
        if name in behind:
            assert scale == np.float16(1 / 127) != calibrated[name]
        else:
            assert np.array_equal(scale, calibrated[name])
