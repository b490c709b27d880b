"""PTQ on real pictures, start to end, through the command line: writes the tables of docs/results/.

    python benchmarks/ptq.py accuracy --shared DIR [--work DIR]
    python benchmarks/ptq.py fullsize --shared DIR [--work DIR]

accuracy: the micro Swin V1 and V2 of DIR/checkpoints on DIR/data/cifar10, both int8 modes and `qdq`, all calibrators.
fullsize: randomly initialised Swin-T and SwinV2-T on the pictures of DIR/data/imagenet_sample: wall time and peak
memory of the whole process, the import of torch included.
"""

import argparse
import os
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
CALIBRATORS = ("max", "percentile", "mse", "entropy")
MICRO = ("swin_micro_cifar10", "swinv2_micro_cifar10")
FULL = ("swin_tiny_patch4_window7_224", "swinv2_tiny_patch4_window8_256")
POLICIES = ("ft-mode1", "ft-mode2", "qdq")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "fullsize"))
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("out/ptq"))
    args = parser.parse_args()
    {"accuracy": accuracy, "fullsize": fullsize}[args.what](args.shared, args.work)


def accuracy(shared: Path, work: Path) -> None:
    cards = []
    for name in MICRO:
        for calibrator in CALIBRATORS:
            output = work / f"{name}-{calibrator}"
            config, weights = (str(shared / "checkpoints" / f"{name}.{suffix}") for suffix in ("yaml", "pth"))
            data = ["--data-path", str(shared / "data" / "cifar10"), "--zip", "--batch-size", "200"]
            how = ["--calibrator", calibrator, "--policy", *POLICIES, "--calib-output-path", str(output)]
            swin_quant("calibrate", "--cfg", config, "--resume", weights, *data, *how)
            cards.append(str(output / f"{name}_calib.json"))
    swin_quant("report", *cards, "--output", str(RESULTS / "ptq_cifar10.md"))
    swin_quant("report", *cards, "--output", str(RESULTS / "ptq_cifar10.csv"))


def fullsize(shared: Path, work: Path) -> None:
    rows, cards = [], []
    for name in FULL:
        output = work / name
        data = ["--data-path", str(shared / "data" / "imagenet_sample"), "--calib-split", "val", "--batch-size", "8"]
        base = ["--cfg", name, "--random-weights", "--opts", "MODEL.NUM_CLASSES", "128", "--int8-mode", "1", *data]
        for what, extra in (("calibrate, 80 pictures", ["--no-eval"]), ("and score 128 pictures, 3 precisions", [])):
            seconds, megabytes = swin_quant("calibrate", *base, *extra, "--calib-output-path", str(output))
            rows.append(f"| {name} | {what} | {seconds:.1f} | {megabytes:.0f} |")
        cards.append(str(output / f"{name}_calib.json"))
    swin_quant("report", *cards, "--output", str(RESULTS / "ptq_fullsize.md"))
    table = "\n".join(["| model | whole process | seconds | peak memory, MB |", "|---|---|---|---|", *rows])
    path = RESULTS / "ptq_fullsize.md"
    path.write_text(f"{path.read_text()}\n{table}\n")


def swin_quant(*arguments: str) -> tuple[float, float]:
    """Run the command in a process of its own; wall seconds and peak resident megabytes."""
    print("swin-quant", *arguments, flush=True)
    start = time.perf_counter()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-m", "swin_quant", *arguments, "--quiet"], os.environ)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"swin-quant {arguments[0]} failed")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


if __name__ == "__main__":
    main()
