"""The cost of calibration beside plain float forward passes of the same pictures, in one run.

    python benchmarks/calibration.py [--cfg NAME] [--data-path DIR] [--rounds N]

Prints a Markdown table: seconds of 80 float forwards (10 batches of 8), of observing the same batches for the max and
the histogram calibrators (median over interleaved rounds, and its ratio to the forwards), seconds of each range
search and of the check of ranges after it, and peak memory, in a new process for each case, with torch, model and
pictures. Pictures are random unless --data-path names a folder.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from pages import in_turns, script_parser
from torch import Tensor

from swin_quant.base.cpu import reproducible
from swin_quant.config import find_config, load_config
from swin_quant.data.loader import load_batches
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import chunks, sample
from swin_quant.data.sources import open_pictures
from swin_quant.models import build_model
from swin_quant.quant.calibration import Method, observe, observing, set_ranges
from swin_quant.quant.check import PICTURES, CheckBatch, check_ranges
from swin_quant.quant.policy import apply_policy, load_policy
from swin_quant.quant.range_methods import RANGE_METHODS

BATCHES, SIZE = 10, 8
Case = Callable[[torch.nn.Module, list[Tensor]], object]


def forward(model: torch.nn.Module, batches: list[Tensor]) -> None:
    with torch.inference_mode():
        for images in batches:
            model(images)


CASES: dict[str, Case] = {
    "float forward": forward,
    "observe, max": lambda model, batches: observe(model, batches, Method("max")),
    "observe, histogram": lambda model, batches: observe(model, batches, Method("percentile")),
    "observe, exact histogram": lambda model, batches: observe(model, batches, Method("percentile", exact=True)),
}


def main() -> None:
    reproducible()
    parser = script_parser(__doc__)
    parser.add_argument("--cfg", default="swin_tiny_patch4_window7_224")
    parser.add_argument("--data-path", default="")
    parser.add_argument("--split", default="val")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    model, batches = prepare(args)
    forward(model, batches[:1])
    seconds = in_turns({name: partial(case, model, batches) for name, case in CASES.items()}, args.rounds)
    memory = {name: peak_memory(name, args) for name in CASES}

    source = "real pictures" if args.data_path else "random pictures"
    print(f"{args.cfg}, {BATCHES} x {SIZE} {source}, {torch.get_num_threads()} threads, torch {torch.__version__},")
    print(f"median of {args.rounds} interleaved rounds\n")
    print("| | seconds | x float forward | peak memory, MB | x float forward |\n|---|---|---|---|---|")
    base = statistics.median(seconds["float forward"])
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(times, seconds["float forward"], strict=True))
        row = f"| {name} | {statistics.median(times):.2f} | {ratio:.2f} "
        print(row + f"| {memory[name]:.0f} | {memory[name] / memory['float forward']:.2f} |")
    print(f"\nfloat forward: {1000 * base / (BATCHES * SIZE):.1f} ms a picture\n")

    calibration = observe(model, batches, Method())
    print("| range search | seconds, all nodes |\n|---|---|")
    total = 0.0
    for method in RANGE_METHODS:
        start = time.perf_counter()
        set_ranges(model, calibration, Method(method))
        total += (elapsed := time.perf_counter() - start)
        print(f"| {method} | {elapsed:.2f} |")
    print(f"| all four | {total:.2f} |")

    apply_policy(model, load_policy("ft-mode1"))
    with observing(model) as observation:
        some = [CheckBatch(n, batch, observation.show(batch)) for n, batch in enumerate(batches[: PICTURES // SIZE])]
    set_ranges(model, observation.calibration(), Method())
    start = time.perf_counter()
    check = check_ranges(model, calibration, Method(), some)
    elapsed = time.perf_counter() - start
    print(f"\ncheck of good ranges, {check.pictures} pictures: {elapsed:.2f} s, {elapsed / base:.2f} x the 80 forwards")


def prepare(args: argparse.Namespace) -> tuple[torch.nn.Module, list[Tensor]]:
    cfg = load_config(find_config(args.cfg))
    torch.manual_seed(0)
    model = build_model(cfg)
    if not args.data_path:
        size = cfg.DATA.IMG_SIZE
        return model, [torch.randn(SIZE, 3, size, size) for _ in range(BATCHES)]
    pictures = open_pictures(args.data_path, args.split)
    indices = chunks(sample(len(pictures), BATCHES * SIZE, 0), SIZE)
    return model, [batch.images for batch in load_batches(pictures, Preprocess.from_config(cfg), indices)]


def peak_memory(name: str, args: argparse.Namespace) -> float:
    """Largest resident set, in megabytes, of a fresh process that does nothing else."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(name, args, sender))
    child.start()
    megabytes = receiver.recv()
    child.join()
    return megabytes


def _measure(name: str, args: argparse.Namespace, sender) -> None:
    model, batches = prepare(args)
    CASES[name](model, batches)
    # VmHWM starts from zero in each program; getrusage would report the larger parent's.
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    sender.send(int(lines["VmHWM"].split()[0]) / 1024)


if __name__ == "__main__":
    main()
