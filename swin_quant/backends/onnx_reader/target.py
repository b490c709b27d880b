"""Export targets that are ONNX files: data for the descriptors of engines that read ONNX."""

from dataclasses import dataclass

from swin_quant.backends.backend import Exports, Tolerances

# The ONNX engines compute fake-quant's formulas. Two differences remain: sums in another order, which move a value
# between two levels by one step, and the rounding of half-precision layers. Measured on micro models with logits up to
# 6: quantized 0.002, where quantization itself costs 0.015; bfloat16 0.005.
ONNX_TOLERANCES = Tolerances(quantized=0.02, float32=0.001, half=0.05)


@dataclass(frozen=True)
class OnnxTarget:
    """The form of ONNX file that an engine wants.

    `float_type`: the default type of float layers; `takes_float16`: float16 is allowed.
    `constants`: store values that other engines compute on loading, such as the position bias of each pair of tokens.
    `symmetric`: the engine takes no zero points. `int4`: it was seen to run INT4 weights. `fp8`: it takes float8.
    `fuses_attention`: it fuses attention of rank 4 into one operator.
    `unsigned`: Q/DQ pairs that a convolution and other operators read are uint8.
    `ends`: it takes uint8 pictures and files with more outputs than logits.
    `compiled`: plugins for its files by default, which are compiled at first use; `are_compiled`: names a function that
    says whether an architecture's files have an operator here.
    """

    name: str
    float_type: str = "float32"
    takes_float16: bool = False
    constants: bool = False
    symmetric: bool = False
    int4: bool = False
    fp8: bool = False
    unsigned: bool = False
    fuses_attention: bool = True
    ends: bool = True
    compiled: tuple[str, ...] = ()
    are_compiled: str = ""


def onnx_target(
    target: OnnxTarget,
    policies: tuple[str, ...],
    next_step: tuple[str, ...] = (),
    with_operators: tuple[str, str] | None = None,
) -> Exports:
    """The export of an engine that reads ONNX."""
    return Exports(
        artifact="onnx",
        export="swin_quant.backends.onnx.export:export",
        options="swin_quant.backends.onnx.options:OnnxOptions",
        policies=policies,
        flags=(
            "opset",
            "float_type",
            "batch",
            "labels",
            "replace",
            "plugin",
            *(("int4_weights",) if target.int4 else ()),
            *(("plain",) if target.compiled else ()),
            *(("uint8_input", "softmax", "top_k") if target.ends else ()),
        ),
        fixed={"target": target.name},
        float_type=target.float_type,
        needs=(("onnx", "onnxscript"), "onnx"),
        detail=target,
        next_step=next_step,
        with_operators=with_operators,
    )
