"""What passes cost for Swin-T at 224: seconds and peak memory, a process for each; prints a Markdown table.

    python benchmarks/passes_cost.py --data-path DIR [--pictures 128] [--policy qdq] [--only NAME ...]

Pictures are those of DIR/val. Weights are seeded random ones: seconds and bytes
do not depend on them. Each row calibrates and runs one pass, or one recipe; "none" is the calibration alone.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "swin_tiny_patch4_window7_224"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--pictures", type=int, default=128)
    parser.add_argument("--policy", default="qdq")
    parser.add_argument("--only", nargs="+", help="rows: none, passes and recipes by name")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # of a process
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args)))
        return
    from swin_quant.quant.names import PASSES
    from swin_quant.quant.passes.recipe import builtin_passes

    print(f"{MODEL}, {args.pictures} pictures, policy {args.policy}\n")
    print("| passes | seconds | peak memory, MB |", "|---|---:|---:|", sep="\n", flush=True)
    for name in args.only or ("none", *PASSES, *builtin_passes()):
        told = [*("--data-path", args.data_path, "--pictures", str(args.pictures), "--policy", args.policy)]
        command = [sys.executable, __file__, *told, "--one", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        seconds, peak = json.loads(done.stdout.splitlines()[-1])
        print(f"| {name} | {seconds:.0f} | {peak:.0f} |", flush=True)


def measured(args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of calibration and passes, and the largest resident set of this process in MB."""
    import torch

    import swin_quant as sq
    from swin_quant.config import find_config, load_config
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.models import build_model
    from swin_quant.quant.passes.recipe import builtin_passes

    torch.manual_seed(0)
    cfg = load_config(find_config(MODEL))
    model = sq.Model(build_model(cfg), MODEL, Preprocess.from_config(cfg))
    passes = [] if args.one == "none" else args.one if args.one in builtin_passes() else [args.one]
    pictures = sq.pictures(args.data_path, "val", args.pictures)
    start = time.perf_counter()
    sq.calibrate(model, pictures, args.policy, passes=passes)
    return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
