"""Rules of NPUs for ONNX files, as data with their sources, and the nodes of a file that break them.

A file that keeps all rules of a target is one that its makers say they take. That it runs, and runs rightly, only the
device shows (docs/devices.md).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swin_quant.backends.onnx_reader.checks import STANDARD, infer_shapes, label

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True)
class NpuRules:
    """The rules of a target.

    `most_rank`: dimensions of a tensor; `takes`: the operators of ONNX that it lists, None: it lists none; `lacks`:
    ones that it is known to compute wrongly or not at all; `sources`: where each rule stands.
    """

    what: str
    most_rank: int
    takes: tuple[str, ...] | None
    lacks: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Misfit:
    """A node that breaks a rule, and the rule in words."""

    node: str
    operator: str
    why: str

    def __str__(self) -> str:
        return f"{self.node} ({self.operator}): {self.why}"


_QNN_OPERATORS = """
Abs Add And ArgMax ArgMin Asin Atan AveragePool BatchNormalization Cast Ceil Clip Concat Conv ConvTranspose Cos CumSum
DepthToSpace DequantizeLinear Div Einsum Elu Equal Exp Expand Flatten Floor Gather GatherElements GatherND Gelu Gemm
GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HardSigmoid HardSwish Identity
InstanceNormalization Inverse IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax
LpNormalization MatMul Max MaxPool Mean Min Mod Mul Neg NonZero Not Or PRelu Pad Pow QuantizeLinear RMSNormalization
RandomNormalLike RandomUniformLike Reciprocal ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Relu Reshape
Resize RoiAlign RotaryEmbedding Round STFT ScatterElements ScatterND Sigmoid Sign Sin Slice Softmax Softplus
SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK Transpose Unsqueeze Upsample Where
Constant
"""  # Constant is an initializer. Erf is not listed: its simulator leaves GELU to the CPU where a file has no Gelu
NPUS: dict[str, NpuRules] = {
    "qnn": NpuRules(
        what="Qualcomm's NPUs by ONNX Runtime's QNN",
        most_rank=5,
        takes=tuple(_QNN_OPERATORS.split()),
        lacks=("Loop", "If", "Scan"),
        sources=(
            "operators, static shapes, no Loop: onnxruntime-qnn, docs/execution_providers/QNN-ExecutionProvider.md",
            "rank: pytorch/executorch issue 14052: QNN refuses tensors of SwinV2-T for their rank 6",
        ),
    ),
    "openvino-npu": NpuRules(
        what="Intel's NPUs by OpenVINO",
        most_rank=5,
        takes=None,
        lacks=("Loop", "If", "Scan", "ScatterND", "ScatterElements", "Where"),
        sources=(
            "static shapes: docs.openvino.ai, Supported Devices: no dynamic shapes on NPUs",
            "windows by tensors above rank 5, masks by ScatterND and Where: openvino issues 37264 (wrong answers, no "
            "error) and 37265 (Swin-L does not compile); OpenVINO's list of ONNX operators is for all devices",
        ),
    ),
}


def misfits(model: "ModelProto", target: str) -> list[Misfit]:
    """The nodes of an ONNX model that break the rules of a target, in the graph's order. SwinQuantError for a graph
    whose shapes contradict each other. Drops the data of large tensors from `model`."""
    rules, graph = NPUS[target], infer_shapes(model)
    shapes = {value.name: value.type.tensor_type.shape for value in (*graph.input, *graph.value_info, *graph.output)}
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    found = [
        Misfit(name, "input", "its shape is open: export with a fixed batch and size")
        for name in sorted({value.name for value in graph.input} - ranks.keys())
        if any(not size.HasField("dim_value") for size in shapes[name].dim)
    ]
    ranks |= {name: len(shape.dim) for name, shape in shapes.items()}
    for node in graph.node:
        if node.op_type in rules.lacks or node.domain not in STANDARD:
            found.append(Misfit(label(node), node.op_type, "the operator is not taken, or not rightly"))
        elif rules.takes is not None and node.op_type not in rules.takes:
            found.append(Misfit(label(node), node.op_type, "the operator is not in the target's list"))
        rank = max((ranks.get(name, 0) for name in (*node.input, *node.output)), default=0)
        if rank > rules.most_rank:
            found.append(Misfit(label(node), node.op_type, f"a tensor of rank {rank}, above {rules.most_rank}"))
    return found
