"""What W8A8 costs a trained model, whatever its architecture: every policy in torch, and on the engine that it is for.

    python benchmarks/any_model.py examples/checkpoints/resnet_micro_cifar10.safetensors --data-path CIFAR10 --zip
        [--work DIR] [--pictures 80] [--output docs/results/any_model.md]

A float checkpoint with its run card is calibrated once on training pictures; all rows are scored on all pictures of the
val split, deltas against float32 with their paired standard errors.
"""

import argparse
from pathlib import Path

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import atomic_write_bytes
from swin_quant.base.reproducible import reproducible
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result
from swin_quant.cli import main as swin_quant

POLICIES = ("cpu", "qdq", "onnxruntime", "tensorrt")
FILES = (("openvino", "cpu"), ("openvino", "qdq"), ("onnxruntime", "onnxruntime"), ("onnxruntime", "qdq"))
HEADING = (
    "# W8A8 of trained models of timm\n\nTop-1 in %, deltas in points against float32 with their paired standard "
    "errors; torch simulates, engines run files. Written by `python benchmarks/any_model.py`.\n\n"
)


def main() -> None:
    reproducible()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--zip", action="store_true")
    parser.add_argument("--pictures", type=int, default=80)
    parser.add_argument("--work", type=Path, default=Path("out/any_model"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    text = HEADING + "\n".join(table(checkpoint, args) for checkpoint in args.checkpoints)
    print(text)
    if args.output:
        atomic_write_bytes(args.output, text.encode())


def table(checkpoint: str, args: argparse.Namespace) -> str:
    """Markdown of one checkpoint: float, the policies simulated, and files on their engines."""
    folder = args.work / Path(checkpoint).stem
    data = ["--data-path", args.data_path, *(["--zip"] if args.zip else [])]
    asked = ["--policy", *POLICIES, "--pictures", str(args.pictures), "--half", "none", "--output", str(folder)]
    _run("calibrate", checkpoint, *asked, *data)
    (calibrated,) = folder.glob("*_calib.json")
    results = list(RunCard.read(calibrated).results)
    for backend, policy in FILES:
        place = folder / f"{backend}_{policy}"
        _run(
            "export", str(calibrated.with_suffix(".pth")), "--for", backend, "--policy", policy, "--output", str(place)
        )
        (file,) = place.glob("*.onnx")
        _run("evaluate", str(file), *data, "--half", "none")
        card = RunCard.read(file.with_suffix(".json"))
        results += [result for result in card.results if result["engine"] == backend]
    rows = [Result.of(result) for result in results]
    lines = [f"{Path(checkpoint).stem}, {rows[0].pictures} pictures", ""]
    lines += ["| engine | precision | policy | top-1 | delta |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_row, rows), ""])


def _row(result: Result) -> str:
    delta = "" if result.delta_acc1 is None else f"{result.delta_acc1:+.2f} ± {result.delta_acc1_se or 0:.2f}"
    cells = (result.engine, result.precision, result.policy or "", f"{result.acc1:.2f}", delta)
    return f"| {' | '.join(cells)} |"


def _run(*words: str) -> None:
    if code := swin_quant(list(words)):
        raise SwinQuantError(f"swin-quant {' '.join(words)} ended with {code}")


if __name__ == "__main__":
    main()
