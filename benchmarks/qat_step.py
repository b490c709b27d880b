"""Time and memory of one QAT step against one float step, eager and compiled: the cost of fake quantization.

    python benchmarks/qat_step.py [--models swin_digits swinv2_digits swin_tiny_patch4_window7_224] [--batch 64]
        [--threads N] [--compile] [--precision O0 O1] [--output docs/results/qat_step.md]

A step is forward, cross entropy, backward, clipping and AdamW. Weights are random and ranges calibrated on noise, which
cost as much as real ones. Memory: on a GPU the peak allocated; on a CPU weights, gradients, optimizer state and the
tensors that autograd saves. Times are the least of several steps, float and QAT taking turns; the report states them
and asserts nothing.
"""

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from pages import save, script_parser, versions_here
from step_memory import saved_bytes, state_bytes
from torch import Tensor, nn

from swin_quant.base.cpu import reproducible
from swin_quant.config import find_config, load_config
from swin_quant.models import build_model
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import apply_policy, enabled_nodes, load_policy, quantize
from swin_quant.train.amax import settle_granularity
from swin_quant.train.optim import make_optimizer
from swin_quant.train.precision import Precision
from swin_quant.train.recipe import Optimizer

MODES = ("float", "frozen", "learned")


def main() -> None:
    reproducible()
    parser = script_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["swin_digits", "swinv2_digits"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--policy", default="ft-mode1")
    parser.add_argument("--precision", nargs="+", default=["O0"], choices=("O0", "O1"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for name in args.models:
        for level in args.precision:
            for compiled in (False, True)[: 1 + args.compile]:
                rows += measured(name, args.batch, args.steps, args.policy, level, compiled, device)
                print(rows[-3:], flush=True)
    table = report(rows, args, device)
    print(table)
    if args.output:
        save(args.output, table)


def measured(
    name: str, batch: int, steps: int, policy: str, level: str, compiled: bool, device: torch.device
) -> list[dict]:
    cfg = load_config(find_config(name))
    images = torch.randn(batch, 3, cfg.DATA.IMG_SIZE, cfg.DATA.IMG_SIZE, device=device)
    labels = torch.randint(cfg.MODEL.NUM_CLASSES, (batch,), device=device)
    precision = Precision.choose(level, "auto", device)
    ways = {mode: prepared(cfg, mode, policy, images, precision, compiled) for mode in MODES}
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(steps + 1):
        for mode, (_, step) in ways.items():  # in turns, so that a busy machine slows all equally
            start = now(device)
            step(images, labels)
            if number:
                times[mode].append(now(device) - start)
    rows = []
    for mode, (model, step) in ways.items():
        memory = peak(model, step, images, labels, precision, device, compiled)
        what = {"model": name, "precision": level, "compiled": compiled, "mode": mode}
        rows.append(what | {"nodes": len(enabled_nodes(model)) if mode != "float" else 0} | {
            "seconds": min(times[mode]), "bytes": memory,
        })  # fmt: skip
    return rows


def prepared(
    cfg, mode: str, policy: str, images: Tensor, precision: Precision, compiled: bool
) -> tuple[nn.Module, Callable]:
    """A model, and a function for one whole training step."""
    torch.manual_seed(0)
    model = build_model(cfg).to(images.device)
    if mode != "float":
        apply_policy(model, load_policy(policy))
        calibrate(model, [images[:4]], Method("percentile"))
        settle_granularity(model, enabled_nodes(model))
        quantize(model)
    if mode == "learned":
        for node in enabled_nodes(model).values():
            node.learn_range()
    model.train()
    optimizer = make_optimizer(model, Optimizer(), len(images))
    network = torch.compile(model) if compiled else model

    def step(images: Tensor, labels: Tensor) -> None:
        F.cross_entropy(precision.logits(network, images), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step.optimizer = optimizer
    return model, step


def peak(
    model: nn.Module, step: Callable, images: Tensor, labels: Tensor, precision: Precision, device, compiled: bool
) -> int | None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step(images, labels)
        return torch.cuda.max_memory_allocated()
    if compiled:
        return None
    kept = saved_bytes(model, lambda: F.cross_entropy(precision.logits(model, images), labels))
    return kept + state_bytes(model, step.optimizer)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def report(rows: list[dict], args: argparse.Namespace, device: torch.device) -> str:
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.processor() or 'CPU'}"
    lines = [
        f"# One QAT step against one float step ({machine}, {torch.get_num_threads()} threads, batch {args.batch}, "
        f"policy {args.policy}, torch {torch.__version__})",
        "",
        *([f"{versions_here()}.", ""] if device.type == "cuda" else []),
        "| model | precision | | ranges | nodes | ms a step | time | MB | memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        same = {key: row[key] for key in ("model", "precision", "compiled")}
        base = next(r for r in rows if r["mode"] == "float" and all(r[key] == same[key] for key in same))
        memory, ratio = "", ""
        if row["bytes"]:
            memory, ratio = f"{row['bytes'] / 1e6:.0f}", f"{row['bytes'] / base['bytes']:.2f} x"
        way, times = "compiled" if row["compiled"] else "eager", f"{row['seconds'] / base['seconds']:.2f} x"
        cells = [row["model"], row["precision"], way, row["mode"], row["nodes"], f"{row['seconds'] * 1e3:.1f}", times]
        lines.append("| " + " | ".join(map(str, [*cells, memory, ratio])) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
