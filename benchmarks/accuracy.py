"""Accuracy of quantized micro models on CIFAR-10: writes docs/results/accuracy.md, a section for each model.

    python benchmarks/accuracy.py [NAME ...] --data-path DIR [--work DIR] [--pictures N] [--output PAGE.md]

DIR is CIFAR-10 as zip files and maps. A model of examples/checkpoints is calibrated once with each calibrator on 80
training pictures. The policies are scored in torch by fake quantization, and exported files on their engines, on the
5,000 pictures of `val` or a seeded sample of them. Everything runs by the command line; finished steps in --work are
not repeated. `POLICIES` and `FILES` say what is scored.
"""

import json
from pathlib import Path
from typing import Any

from pages import EXAMPLES, RESULTS, join_cells, place, script_parser, swin_quant

SWIN = ("swin_micro_cifar10", "swinv2_micro_cifar10")
OTHERS = tuple(f"{name}_micro_cifar10" for name in ("resnet", "convnext", "mobilenetv3", "vit"))
MODES = ("ft-mode1", "ft-mode2", "qdq")
# Calibrator -> the policies that are scored in torch; the first calibrator's file is exported
POLICIES = {"percentile": (*MODES, *"cpu onnxruntime cuda tensorrt tensorrt-fp8 cuda-fp8 w4a16 w4a16-blocks".split())}
POLICIES |= dict.fromkeys(("max", "mse", "entropy"), MODES)
POLICIES_OF_OTHERS = {"percentile": ("cpu", "qdq", "onnxruntime", "tensorrt")}
FILES = (  # target of `export`, policy
    ("openvino", "cpu"),
    ("openvino", "qdq"),
    ("onnxruntime", "onnxruntime"),
    ("onnxruntime", "qdq"),
)
FILES_OF_SWIN = (
    *FILES[::2],
    ("fastertransformer", "ft-mode1"),
    ("fastertransformer", "ft-mode2"),
    ("cuda", "cuda"),
    ("cuda", "cuda-fp8"),
)
COLUMNS = ("engine", "policy", "calibrator", "top-1", "delta", "agree %", "SQNR dB")


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"models (default: {' '.join((*SWIN, *OTHERS))})")
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("out/accuracy"))
    parser.add_argument("--pictures", type=int, help="score a seeded sample of so many (default: all)")
    parser.add_argument("--output", type=Path, default=RESULTS / "accuracy.md")
    args = parser.parse_args()
    pictures = ["--data-path", args.data_path, "--zip"]
    sample = ["--pictures", args.pictures] if args.pictures else []
    for name in args.names or (*SWIN, *OTHERS):
        rows = scored(name, args.work / name, pictures, sample)
        table = [join_cells(COLUMNS), "|---" * len(COLUMNS) + "|", *map(join_cells, rows)]
        place(args.output, name, "\n".join(table) + "\n")
        print("\n".join(table), flush=True)


def scored(name: str, work: Path, pictures: list[Any], sample: list[Any]) -> list[list[str]]:
    """The rows of a model: float32, each calibrator and policy in torch, then files on engines."""
    rows: dict[tuple[str, ...], list[str]] = {}
    policies = POLICIES if name in SWIN else POLICIES_OF_OTHERS
    for calibrator, chosen in policies.items():
        output = work / calibrator
        checkpoint = output / f"{name}_calib.pth"
        if not checkpoint.exists():
            how = ["--calibrator", calibrator, "--policy", "qdq", "--output", output]
            swin_quant("calibrate", EXAMPLES / f"{name}.safetensors", *pictures, *how)
        rows |= results(checkpoint, calibrator, "--policy", *chosen, *pictures, *sample)
    for target, policy in FILES_OF_SWIN if name in SWIN else FILES:
        if name.startswith("swinv2") and policy == "ft-mode2":
            continue  # FasterTransformer has one mode for V2
        folder = work / f"{target}_{policy}"
        source = work / "percentile" / f"{name}_calib.pth"
        if not folder.exists():
            swin_quant("export", source, "--for", target, "--policy", policy, "--output", folder)
        (card,) = (card for card in folder.glob("*.json") if "results" in json.loads(card.read_text()))
        file = next(file for file in folder.glob(f"{card.stem}.*") if file.suffix in (".onnx", ".pth", ".safetensors"))
        rows |= results(file, "percentile", "--engine", target, *pictures, *sample)
    return list(rows.values())


def results(file: Path, calibrator: str, *words: object) -> dict[tuple[str, ...], list[str]]:
    """The rows of a checkpoint or artifact by engine, policy and calibrator, from its card, scored now if need be."""
    card = file.with_suffix(".json")
    if not json.loads(card.read_text())["results"]:
        swin_quant("evaluate", file, "--half", "none", *words)
    found = {}
    for result in json.loads(card.read_text())["results"]:
        policy = result["policy"] or result["precision"]
        used = calibrator if result["policy"] else ""
        delta = "" if result["delta_acc1"] is None else f"{result['delta_acc1']:+.2f} ± {result['delta_acc1_se']:.2f}"
        figures = (f"{result[key]:.{digits}f}" if result[key] is not None else ""
                   for key, digits in (("agreement", 2), ("sqnr_db", 1)))  # fmt: skip
        cells = [result["engine"], policy, used, f"{result['acc1']:.2f}", delta, *figures]
        found[result["engine"], policy, used] = cells
    return found


if __name__ == "__main__":
    main()
