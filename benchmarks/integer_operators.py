"""Swin-T's linears in int8 on ONNX Runtime, as Q/DQ and as integer operators by name: writes
docs/results/integer_operators.md.

    python benchmarks/integer_operators.py [--rounds 15] [--batches 1 8] [--threads 1]

Each linear is a graph of its own, with random numbers; the forms take turns, call by call.
"""

import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from pages import RESULTS, cpu, in_turns, place, script_parser

PAGE = RESULTS / "integer_operators.md"
FORMS = {  # form -> its operators between the float input and the float product
    "Q/DQ": ("QuantizeLinear", "DequantizeLinear", "MatMul"),
    "MatMulInteger": ("QuantizeLinear", "MatMulInteger", "Cast", "Mul"),
    "QLinearMatMul": ("QuantizeLinear", "QLinearMatMul", "DequantizeLinear"),
}
HEAD = """# Integer operators by name

Would ONNX Runtime run Swin-T's linears faster from MatMulInteger or QLinearMatMul in the file than from Q/DQ pairs,
which it fuses to integer products on loading? All 53 linears with int8 weights, a scale a column, uint8 inputs and a
bias, each a graph of its own, default settings. Milliseconds: the fastest call of each linear, summed over the network;
the forms took turns, call by call. QLinearMatMul rounds its product to uint8 besides. `times Q/DQ`, of MatMulInteger
and of QLinearMatMul: above 1 the form is faster. Neither is, so that our files keep Q/DQ. Written by
`python benchmarks/integer_operators.py`.
"""


def linears() -> Iterator[tuple[int, int, int, int]]:
    """Tokens, inputs and outputs of Swin-T's linears, and how many there are."""
    for stage, depth in enumerate((2, 2, 6, 2)):
        width, tokens = 96 << stage, (56 >> stage) ** 2
        for inputs, outputs in ((1, 3), (1, 1), (1, 4), (4, 1)):
            yield tokens, inputs * width, outputs * width, depth
        if stage < 3:
            yield tokens // 4, 4 * width, 2 * width, 1
    yield 1, 768, 1000, 1


def graph(form: str, batch: int | str, tokens: int, inputs: int, outputs: int) -> onnx.ModelProto:
    """x float32 [batch, tokens, inputs] -> y float32 [batch, tokens, outputs]."""
    random = np.random.default_rng(0)
    scale, column = np.float32(0.02), random.uniform(0.001, 0.002, outputs).astype(np.float32)
    constants = {
        "scale": scale,
        "zero": np.uint8(128),
        "weight": random.integers(-127, 128, (inputs, outputs), np.int8),
        "column": column,
        "column_zero": np.zeros(outputs, np.int8),
        "both": scale * column,
        "product_scale": np.float32(0.05 * inputs**0.5 / 10),
        "bias": random.standard_normal((1, outputs)).astype(np.float32),
    }
    node, x = helper.make_node, ("q", "scale", "zero")
    weight = ("weight", "column", "column_zero")
    behind = {
        "Q/DQ": [
            node("DequantizeLinear", x, ["d"]),
            node("DequantizeLinear", weight, ["w"], axis=1),
            node("MatMul", ["d", "w"], ["product"]),
        ],
        "MatMulInteger": [
            node("MatMulInteger", ["q", "weight", "zero", "column_zero"], ["levels"]),
            node("Cast", ["levels"], ["wide"], to=TensorProto.FLOAT),
            node("Mul", ["wide", "both"], ["product"]),
        ],
        "QLinearMatMul": [
            node("QLinearMatMul", [*x, *weight, "product_scale", "zero"], ["levels"]),
            node("DequantizeLinear", ["levels", "product_scale", "zero"], ["product"]),
        ],
    }
    nodes = [
        node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        *behind[form],
        node("Add", ["product", "bias"], ["y"]),
    ]
    read = {name for one in nodes for name in one.input}
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items() if name in read]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, tokens, width])
        for name, width in (("x", inputs), ("y", outputs))
    ]
    made = helper.make_graph(nodes, "linear", ends[:1], ends[1:], stored)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def session(model: onnx.ModelProto, threads: int) -> onnxruntime.InferenceSession:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = threads, 4
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, ["CPUExecutionProvider"])


def milliseconds(batch: int, is_open: bool, rounds: int, threads: int) -> dict[str, float]:
    """Form -> milliseconds of all linears of the network for a batch, which the graphs fix unless it `is_open`."""
    total = dict.fromkeys(FORMS, 0.0)
    for tokens, inputs, outputs, count in linears():
        images = np.random.default_rng(1).standard_normal((batch, tokens, inputs)).astype(np.float32)
        size = "batch" if is_open else batch
        sessions = {form: session(graph(form, size, tokens, inputs, outputs), threads) for form in FORMS}
        answers = {form: one.run(None, {"x": images})[0] for form, one in sessions.items()}
        assert np.allclose(answers["Q/DQ"], answers["MatMulInteger"], atol=1e-3), "the forms do not compute the same"
        calls = {form: partial(one.run, None, {"x": images}) for form, one in sessions.items()}
        for form, seconds in in_turns(calls, rounds).items():
            total[form] += 1000 * count * min(seconds)
    return total


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--note", default="", help="on the conditions, for the page")
    args = parser.parse_args()
    lines = [f"| batch | {', ms | '.join(FORMS)}, ms | times Q/DQ |", "|---" * 5 + "|"]
    for batch in args.batches:
        for kind, is_open in (("static", False), ("dynamic", True)):
            found = milliseconds(batch, is_open, args.rounds, args.threads)
            ratios = ", ".join(f"{found['Q/DQ'] / found[form]:.2f}" for form in list(FORMS)[1:])
            times = " | ".join(f"{found[form]:.1f}" for form in FORMS)
            lines.append(f"| {batch}, {kind} | {times} | {ratios} |")
            print(lines[-1], flush=True)
    about = (
        f"ONNX Runtime {onnxruntime.__version__}, {args.threads} thread, {args.rounds} rounds, {time.strftime('%F')}"
    )
    place(PAGE, HEAD, cpu(), "\n".join([*lines, "", f"{about}{', ' + args.note if args.note else ''}."]))


if __name__ == "__main__":
    main()
