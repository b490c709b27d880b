"""Where quantization and each engine leave the float model, layer by layer: writes docs/results/align.md.

    python benchmarks/align.py --data-path DIR/data/cifar10 [--models NAME ...] [--work DIR]

The micro models of examples/checkpoints are calibrated on 80 pictures, exported in float and in INT8 for each engine
that runs here, and aligned on 16 pictures of `val`: the float files and the quantized model (torch fake-quant) against
the float model, the INT8 files against that quantized model. The CUDA engine runs the references of its kernels.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pages import EXAMPLES, RESULTS, line_of, place, script_parser, swin_quant

output_of = partial(swin_quant, returned=True)


@dataclass(frozen=True)
class Row:
    """The exports of one model for an engine: the policy of the INT8 file, whether there is a float file, and flags."""

    engine: str
    policy: str
    float32: bool = True
    flags: tuple[str, ...] = ()
    note: str = ""


SWIN = (
    Row("onnxruntime", "qdq"),
    Row("openvino", "cpu"),
    Row("fastertransformer", "ft-mode1", float32=False),
    Row("cuda", "cuda"),
    Row("cuda", "ft-mode1", float32=False),
    Row("torchscript", "qdq"),
    Row("torchscript", "qdq", False, ("--plugin", "roll=magicmind::Roll"), ", roll as a plugin"),
)
TIMM = (Row("onnxruntime", "onnxruntime"), Row("openvino", "cpu"))
MODELS = {
    "swin_micro_cifar10": SWIN,
    "swinv2_micro_cifar10": SWIN,
    "resnet_micro_cifar10": TIMM,
    "convnext_micro_cifar10": TIMM,
    "mobilenetv3_micro_cifar10": TIMM,
    "vit_micro_cifar10": TIMM,
}
HALF = ("cuda",)  # engines whose float files compute in float16
HEADING = """# Alignment, layer by layer

Made by `python benchmarks/align.py --data-path DIR/data/cifar10`: `swin-quant align A B` on 16 pictures of CIFAR-10's
`val`. SQNR is of B against A; the fall is where it drops most, to a tensor that is worse than all before.

Shown beside the logits: ONNX Runtime and OpenVINO every module, nodes of its own included; the CUDA engine, here
by its kernels' references on a CPU, the outputs of blocks and the nodes that it leaves in memory; FasterTransformer's
arithmetic, emulated and on the CUDA engine, the residual stream between blocks. TorchScript shows logits only: a trace
runs as a whole, which `align` says.
"""
TITLES = """| A | B | tensors | worst, dB | at | largest fall at | from, to dB | logits, dB | first below the limit |
|---|---|---:|---:|---|---|---|---:|---|
"""


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--work", type=Path, default=Path("out/align"))
    args = parser.parse_args()
    for name in args.models:
        lines = aligned(name, ["--data-path", args.data_path, "--zip"], args.work)
        place(RESULTS / "align.md", HEADING, name, TITLES + "\n".join(lines))


def aligned(name: str, pictures: list, work: Path) -> list[str]:
    """The table lines of a model."""
    checkpoint = EXAMPLES / f"{name}.safetensors"
    folder = work / name
    swin_quant("calibrate", checkpoint, *pictures, "--pictures", 80, "--output", folder)
    calibrated = folder / f"{name}_calib.pth"
    compare = ["--pictures", 16, *pictures, "--json"]
    lines, shown = [], set()
    for number, row in enumerate(MODELS[name]):
        fake, made = f"fake-quant {row.policy}", folder / str(number)
        if row.policy not in shown:
            found = output_of("align", calibrated, calibrated, "--policy", "float", row.policy, *compare)
            lines.append(line("torch float32", fake, found))
            shown.add(row.policy)
        if row.float32:
            words = ["--for", row.engine, "--precision", "float", *row.flags, "--output", made / "float"]
            file = output_of("export", checkpoint, *words).strip().splitlines()[-1]
            found = output_of("align", checkpoint, file, "--engine", row.engine, *compare)
            precision = "float16" if row.engine in HALF else "float32"
            lines.append(line("torch float32", f"{row.engine} {precision}{row.note}", found))
        words = ["--for", row.engine, "--policy", row.policy, *row.flags, "--output", made]
        file = output_of("export", calibrated, *words).strip().splitlines()[-1]
        found = output_of("align", calibrated, file, "--policy", row.policy, "--engine", row.engine, *compare)
        lines.append(line(fake, f"{row.engine} INT8{row.note or policy_of(row)}", found))
    return lines


def policy_of(row: Row) -> str:
    """The policy of a file, if the engine has several here."""
    return f", {row.policy}" if row.engine in HALF else ""


def line(a: str, b: str, text: str) -> str:
    """One table line from the output of `align --json`."""
    found = json.loads(text)
    rows = {row["name"]: row for row in found["tensors"] if row["sqnr_db"] is not None}
    worst = min(rows.values(), key=lambda row: row["sqnr_db"]) if rows else None
    fall = found["largest_fall"]
    behind = f"{found['fall_from_db']:.1f} to {rows[fall]['sqnr_db']:.1f}" if fall else "-"
    cells = [a, b, len(found["tensors"]),
             *((f"{worst['sqnr_db']:.1f}", worst["name"]) if worst else ("equal", "-")),
             fall or "-", behind, f"{rows['logits']['sqnr_db']:.1f}" if "logits" in rows else "equal",
             f"{found['first'] or 'none'} ({found['below_db']:g})"]  # fmt: skip
    return line_of(cells)


if __name__ == "__main__":
    main()
