"""Targets that are ONNX files: what an engine that reads them says in its descriptor."""

from dataclasses import dataclass

from swin_quant.backends.backend import Exports, Tolerances

# The ONNX engines compute fake-quant's own formulas: what is left is sums in another order, which move a value by one
# step where it lies between two, and what a half-precision body rounds. Measured on micro models of logits up to 6:
# quantized 0.002, where quantization itself costs 0.015; bfloat16 0.005.
ONNX_TOLERANCES = Tolerances(quantized=0.02, float32=0.001, half=0.05)


@dataclass(frozen=True)
class OnnxTarget:
    """What an ONNX file for an engine is like: `float_type` where none is asked for; whether it may be float16.

    `constants`: what an engine would compute on loading, as position biases are looked up, is stored as it is.
    `symmetric`: the engine takes no zero points. `int4`: it was seen to run weights of INT4. `fp8`: it takes float8.
    `fuses_attention`: of rank 4 it makes one operator. `unsigned`: pairs that a convolution and others read are of
    uint8. `ends`: it takes pictures of uint8, and files that give more than logits.
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


def onnx_target(target: OnnxTarget, policies: tuple[str, ...], next_step: tuple[str, ...] = ()) -> Exports:
    """What `export` writes for an engine that reads ONNX."""
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
            *(("uint8_input", "softmax", "top_k") if target.ends else ()),
        ),
        fixed={"target": target.name},
        float_type=target.float_type,
        detail=target,
        next_step=next_step,
    )
