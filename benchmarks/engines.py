"""Every artifact on every engine that runs here, on real pictures: writes docs/results/engines_cifar10.csv.

    python benchmarks/engines.py --shared DIR [--work DIR]

The micro Swin V1 and V2 of DIR/checkpoints are calibrated on DIR/data/cifar10, exported for each target, verified, and
scored on the 5,000 pictures of `val` beside the float model, all by the command line.
"""

import shutil
from pathlib import Path

from pages import RESULTS, script_parser, swin_quant

MICRO = ("swin_micro_cifar10", "swinv2_micro_cifar10")
# Exports: folder -> flags. FasterTransformer has one mode for V2.
EXPORTS = {
    "openvino": ["--for", "openvino"],
    "onnxruntime": ["--for", "onnxruntime"],
    "onnx": ["--for", "onnx"],
    "ft1": ["--for", "fastertransformer", "--policy", "ft-mode1"],
    "ft2": ["--for", "fastertransformer", "--policy", "ft-mode2"],
}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("out/engines"))
    args = parser.parse_args()
    cards = [card for name in MICRO for card in scored(name, args.shared, args.work / name)]
    swin_quant("report", *cards, "--output", args.work)
    shutil.copy(args.work / "accuracy.csv", RESULTS / "engines_cifar10.csv")


def scored(name: str, shared: Path, folder: Path) -> list[Path]:
    """The run cards of all of a model's artifacts, with their results."""
    config, weights = (shared / "checkpoints" / f"{name}.{suffix}" for suffix in ("yaml", "pth"))
    pictures = ["--data-path", shared / "data" / "cifar10", "--zip"]
    calibrated = folder / f"{name}_calib.pth"
    told = ["--policy", "ft-mode1", "--output", folder]
    swin_quant("calibrate", "--cfg", config, "--checkpoint", weights, *pictures, *told)
    artifacts = []
    for place, flags in EXPORTS.items():
        if place == "ft2" and name.startswith("swinv2"):
            continue
        done = swin_quant("export", "--checkpoint", calibrated, *flags, "--output", folder / place, returned=True)
        print(done, flush=True)
        artifacts.append(Path(done.strip().splitlines()[-1]))
    for artifact in artifacts:
        swin_quant("verify", artifact, "--checkpoint", calibrated, *pictures)
    swin_quant("evaluate", *artifacts, "--checkpoint", calibrated, *pictures, "--batch", "200")
    return [artifact.with_suffix(".json") for artifact in artifacts]


if __name__ == "__main__":
    main()
