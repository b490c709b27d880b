"""The cost of passes for Swin-T at 224: seconds and peak memory, in a process each: docs/results/passes_cost.md.

    python benchmarks/passes_cost.py --data-path DIR [--pictures 128] [--policy qdq] [--only NAME ...] [--note TEXT]

Pictures are from DIR/val. Weights are random and seeded: seconds and bytes do not depend on them. Each row calibrates
and runs one pass, or one recipe; "none" is the calibration alone. Rows of earlier runs are kept (--work). CPU seconds
count all threads. --note says what else ran, which affects seconds, but not memory.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from pages import RESULTS, ROOT, save, script_parser

PAGE = RESULTS / "passes_cost.md"
MODEL = "swin_tiny_patch4_window7_224"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--pictures", type=int, default=128)
    parser.add_argument("--policy", default="qdq")
    parser.add_argument("--only", nargs="+", help="rows: none, passes and recipes by name")
    parser.add_argument("--work", type=Path, default=Path("out/passes_cost"))
    parser.add_argument("--note", default="", help="what ran beside")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # for the child process
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args)))
        return
    from swin_quant.quant import PASSES
    from swin_quant.quant.passes.recipe import builtin_passes

    args.work.mkdir(parents=True, exist_ok=True)
    kept = args.work / f"{args.policy}_{args.pictures}.json"
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    names = ("none", *PASSES, *builtin_passes())
    for name in args.only or names:
        if name in rows:
            continue
        told = [*("--data-path", args.data_path, "--pictures", str(args.pictures), "--policy", args.policy)]
        command = [sys.executable, __file__, *told, "--one", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        kept.write_text(json.dumps(rows))
        print(name, rows[name], flush=True)
        write({name: rows[name] for name in names if name in rows}, args)


def write(rows: dict, args: argparse.Namespace) -> None:
    threads = os.environ.get("OMP_NUM_THREADS", os.cpu_count())
    page = [
        "# What passes cost",
        "",
        f"{MODEL}, random weights, {args.pictures} pictures of 224 x 224, policy {args.policy}: calibration and what",
        "runs behind it. *none*: the calibration alone. CPU seconds of all threads; peak: the largest resident set of",
        f"the process, Python and torch included. {threads} threads. Written by",
        f"`python benchmarks/passes_cost.py`. {args.note}".rstrip(),
        "",
        "| passes | CPU | seconds | CPU s | peak memory, MB |",
        "|---|---|---:|---:|---:|",
        *(
            f"| {name} | {chip} | {wall:.0f} | {cpu:.0f} | {peak:.0f} |"
            for name, (wall, cpu, peak, chip, _) in rows.items()
        ),
        "",
        *(
            f"* seconds of {name}'s passes: {', '.join(f'{one} {took:.0f}' for one, took in parts)}"
            for name, (*_, parts) in rows.items()
            if len(parts) > 1
        ),
    ]
    save(PAGE, "\n".join(page).rstrip() + "\n")


def measured(args: argparse.Namespace) -> tuple[float, float, float, str, list[tuple[str, float]]]:
    """Seconds and CPU seconds of calibration and passes, this process's largest resident set in MB, the CPU, and the
    seconds of each pass."""
    import torch

    import swin_quant as sq
    from swin_quant.cards.card import versions
    from swin_quant.config import find_config, load_config
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.models import build_model
    from swin_quant.quant.passes.recipe import builtin_passes

    torch.manual_seed(0)
    cfg = load_config(find_config(MODEL))
    model = sq.Model(build_model(cfg), MODEL, Preprocess.from_config(cfg))
    passes = [] if args.one == "none" else args.one if args.one in builtin_passes() else [args.one]
    pictures = sq.pictures(args.data_path, "val", args.pictures)
    start, busy = time.perf_counter(), time.process_time()
    done = sq.calibrate(model, pictures, args.policy, passes=passes).card.calibration
    wall, cpu = time.perf_counter() - start, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return wall, cpu, peak, versions()["cpu"], [(one["name"], one["seconds"]) for one in done.get("passes", [])]


if __name__ == "__main__":
    main()
