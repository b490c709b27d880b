"""Where quantization and each engine leave the float model, layer by layer: writes docs/results/align.md.

    python benchmarks/align.py --data-path DIR/data/cifar10 [--work DIR]

The micro Swin V1 and V2 of examples/checkpoints are calibrated on 80 pictures, exported in float and in INT8 for each
engine that runs here, and aligned on 16 pictures of `val`: the float files and the quantized model (torch fake-quant)
against the float model, the INT8 files against that quantized model.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("swin_micro_cifar10", "swinv2_micro_cifar10")
# Engine -> what it is exported for, and under which policy.
ENGINES = {
    "onnxruntime": ("onnxruntime", "qdq"),
    "openvino": ("openvino", "cpu"),
    "fastertransformer": ("fastertransformer", "ft-mode1"),
}
HEAD = """# Alignment, layer by layer

Made by `python benchmarks/align.py --data-path DIR/data/cifar10`: `swin-quant align A B` on 16 pictures of CIFAR-10's
`val`. SQNR is of B against A; the fall is where it drops most, to a tensor that is worse than all before.
FasterTransformer's emulator shows the residual stream between blocks, the others every module of the model.

| model | A | B | tensors | worst, dB | at | largest fall at | from, to dB | logits, dB | first below the limit |
|---|---|---|---:|---:|---|---|---|---:|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("out/align"))
    args = parser.parse_args()
    lines = [line for name in MODELS for line in aligned(name, ["--data-path", args.data_path, "--zip"], args.work)]
    (ROOT / "docs" / "results" / "align.md").write_text(HEAD + "\n".join(lines) + "\n")


def aligned(name: str, pictures: list, work: Path) -> list[str]:
    """The lines of a model."""
    checkpoint = ROOT / "examples" / "checkpoints" / f"{name}.safetensors"
    folder = work / name
    told = ["--policy", "ft-mode1", "--pictures", 80, "--no-eval", "--output", folder]
    swin_quant("calibrate", checkpoint, *pictures, *told)
    calibrated = folder / f"{name}_calib.pth"
    compare = ["--pictures", 16, *pictures, "--json"]
    lines = []
    for engine, (target, policy) in ENGINES.items():
        fake = f"fake-quant {policy}"
        found = swin_quant("align", calibrated, calibrated, "--policy", "float", policy, *compare)
        lines.append(line(name, "torch float32", fake, found))
        if engine != "fastertransformer":
            words = ["--for", target, "--precision", "float", "--output", folder / engine / "float"]
            file = swin_quant("export", checkpoint, *words).strip().splitlines()[-1]
            found = swin_quant("align", checkpoint, file, "--engine", engine, *compare)
            lines.append(line(name, "torch float32", f"{engine} float32", found))
        words = ["--for", target, "--policy", policy, "--output", folder / engine]
        file = swin_quant("export", calibrated, *words).strip().splitlines()[-1]
        found = swin_quant("align", calibrated, file, "--policy", policy, "--engine", engine, *compare)
        lines.append(line(name, fake, f"{engine} INT8", found))
    return lines


def line(name: str, a: str, b: str, text: str) -> str:
    """One line of the table from what `align --json` printed."""
    found = json.loads(text)
    rows = {row["name"]: row for row in found["tensors"] if row["sqnr_db"] is not None}
    worst = min(rows.values(), key=lambda row: row["sqnr_db"])
    fall = found["largest_fall"]
    behind = f"{found['fall_from_db']:.1f} to {rows[fall]['sqnr_db']:.1f}" if fall else "-"
    cells = [name.removesuffix("_cifar10"), a, b, len(found["tensors"]), f"{worst['sqnr_db']:.1f}", worst["name"],
             fall or "-", behind, f"{rows['logits']['sqnr_db']:.1f}" if "logits" in rows else "equal",
             f"{found['first'] or 'none'} ({found['below_db']:g})"]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def swin_quant(*words: object) -> str:
    """Run a command, and return what it printed."""
    command = [sys.executable, "-m", "swin_quant", *map(str, words), "--quiet"]
    print(" ".join(command), flush=True)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
