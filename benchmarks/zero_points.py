"""The gain and the cost of zero points: writes docs/results/zero_points.md.

    python benchmarks/zero_points.py choose --data-path DIR            (training pictures: behind policy `cpu`)
    python benchmarks/zero_points.py accuracy --data-path DIR          (the 5,000 of `val`, on both engines)
    python benchmarks/zero_points.py saturation --data-path DIR        (OpenVINO held to AVX2, 1,000 of `val`)
    python benchmarks/zero_points.py latency --data-path DIR           (on a machine that does nothing else)

DIR is CIFAR-10 as zip files and maps. Each command stores its measurements in `--work`; sections of the page without
measurements there stay unchanged.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pages import EXAMPLES, RESULTS, batches_of, cifar10, float_model, line_of, save, script_parser, swin_quant

PAGE = RESULTS / "zero_points.md"
MODELS = ("swin_micro_cifar10", "swinv2_micro_cifar10")
FC2, SOFTMAX = "*.mlp.fc2._input_quantizer", "*.attn.matmul_a_input_quantizer"
ALL = ("role:gemm_input",)
# Title -> base policy (without zero points), and the nodes that get one.
VARIANTS = {
    "linears": ("symmetric", ()),
    "linears, fc2": ("symmetric", (FC2,)),
    "linears, all inputs": ("symmetric", ALL),
    "qdq": ("qdq", ()),
    "qdq, fc2": ("qdq", (FC2,)),
    "qdq, fc2 and softmax": ("qdq", (FC2, SOFTMAX)),
    "qdq, all inputs": ("qdq", (*ALL, "role:matmul_input")),
}
METHODS = ("percentile", "mse", "max")
ENGINES = ("openvino", "onnxruntime")
WAYS = {
    "linears": ("symmetric", ()),
    "linears, zero point in front of fc2": ("symmetric", (FC2,)),
    "linears, zero point at every input": ("symmetric", ALL),
    "qdq": ("qdq", ()),
    "qdq, zero point in front of fc2": ("qdq", (FC2,)),
}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("what", choices=("choose", "accuracy", "saturation", "latency"))
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("out/zero_points"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--rounds", type=int, default=16, help="of timing, at least 2 (default 16)")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # for the child process: model, engine, pictures
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: must be at least 2")
    if args.one:
        name, engine, pictures = args.one
        print(json.dumps(measured(args, name, engine, int(pictures), batch=100)))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    rows = {"choose": choose, "accuracy": accuracy, "saturation": saturation, "latency": latency}[args.what](args)
    (args.work / f"{args.what}.json").write_text(json.dumps(rows))
    write_page(args.work)


def symmetric():
    """Only linears, with one range a row for weights, without zero points: an earlier policy `cpu`."""
    from swin_quant.quant.policy import policy_from_dict

    rules = [{"enable": "role:gemm_input"}, {"enable": "role:gemm_weight", "granularity": "per-channel"}]
    return policy_from_dict({"name": "symmetric", "rules": rules}, "benchmark")


def chosen(base: str, selectors):
    from swin_quant.quant.policy import load_policy

    policy = symmetric() if base == "symmetric" else load_policy(base)
    return policy.asymmetric(*selectors) if selectors else policy


def choose(args: argparse.Namespace) -> list[list[str]]:
    """Calibrate on 80 training pictures, and score 1,024 others by fake-quant."""
    import torch

    from swin_quant.data.sampling import sample
    from swin_quant.quant.calibration import Method, observe, set_ranges
    from swin_quant.quant.policy import apply_policy, dequantize, quantize
    from swin_quant.score.difference import difference

    rows = []
    for name in args.model:
        cfg, model = float_model(EXAMPLES / f"{name}.yaml", EXAMPLES / f"{name}.safetensors")
        pictures = cifar10(args.data_path, "train")
        picked = sample(len(pictures), 2048, 0)
        seen, others = batches_of(pictures, cfg, picked[:80], 8), batches_of(pictures, cfg, picked[1024:], 64)

        def logits(model=model, others=others):
            with torch.inference_mode():
                return torch.cat([model(batch.images) for batch in others])

        expected, calibration = logits(), observe(model, [batch.images for batch in seen])
        for title, (base, selectors) in VARIANTS.items():
            found = []
            for method in METHODS:
                apply_policy(model, chosen(base, selectors))
                set_ranges(model, calibration, Method(method))
                quantize(model)
                near = difference(logits(), expected)
                dequantize(model)
                found += [f"{near['sqnr_db']:.1f}", f"{near['agreement']:.1f}"]
            rows.append([name, title, *found])
            print(*rows[-1], sep=" | ", flush=True)
    return rows


def prepare(args: argparse.Namespace, name: str, engine: str) -> dict[str, Path]:
    """The exported file of each way; each is made once, as is the calibrated checkpoint."""
    source, data = EXAMPLES / name, ["--data-path", args.data_path, "--zip"]
    calibrated = args.work / f"{name}_calib.pth"
    if not calibrated.with_suffix(".json").exists():
        told = ["--policy", "qdq", "--output", args.work]
        swin_quant("calibrate", "--cfg", f"{source}.yaml", "--checkpoint", f"{source}.safetensors", *data, *told)
    made = {}
    for way, (base, selectors) in WAYS.items():
        for suffix, more in (("", []), (", safe", ["--saturation-safe"])):
            if base == "qdq" and (suffix or engine == "openvino"):
                continue  # OpenVINO has no safe qdq, and cpu is faster
            folder = args.work / engine / f"{way}{suffix}".replace(" ", "_")
            made[way + suffix] = folder / f"{name}_{'w7a8' if more else 'int8'}_{engine}.onnx"
            if not made[way + suffix].exists():
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "policy.yaml").write_text(json.dumps(chosen(base, selectors).to_dict()))  # JSON is YAML
                told = ["--for", engine, "--policy", folder / "policy.yaml", "--output", folder, *more]
                swin_quant("export", "--checkpoint", calibrated, *told)
    return made


def measured(
    args: argparse.Namespace, name: str, engine: str, pictures: int, batch: int, rounds: int = 1
) -> dict[str, Any]:
    """The row of each way, against the float model; with several `rounds`, those without "safe" are timed in turns."""
    from swin_quant.backends.registry import artifact_engine, engine_named, torch_engine
    from swin_quant.cards.card import RunCard
    from swin_quant.cards.paths import card_path
    from swin_quant.report.engines import bench_data
    from swin_quant.score.bench import BenchPlan, load_pictures, measure
    from swin_quant.score.candidate import BenchCandidate
    from swin_quant.score.options import EngineOptions
    from swin_quant.verbs.bench_candidates import REFERENCE

    files, checkpoint = prepare(args, name, engine), args.work / f"{name}_calib.pth"
    config = RunCard.read(card_path(checkpoint)).config
    candidates = [BenchCandidate(REFERENCE, partial(torch_engine, str(checkpoint), config), checkpoint)]
    if rounds > 1:
        candidates, files = [], {way: file for way, file in files.items() if "safe" not in way}
    for way, file in files.items():
        load = partial(artifact_engine, str(file), engine_named(engine), EngineOptions(args.threads))
        candidates.append(BenchCandidate(way, load, None, None if way == "linears" else "linears"))
    scored = load_pictures(str(checkpoint), str(args.data_path), "val", True, pictures)
    plan = BenchPlan((batch,), rounds, 0.25 if rounds > 1 else 0.001, args.threads)
    rows = bench_data(measure(name, candidates, plan, scored))["rows"]
    return {row["candidate"]: row for row in rows if row["candidate"] in files}


def accuracy(args: argparse.Namespace) -> list[list[str]]:
    return scores(args, 5000, {"this one": {}}, args.engine)


def saturation(args: argparse.Namespace) -> list[list[str]]:
    return scores(args, 1000, {"AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}, ("openvino",))


def scores(
    args: argparse.Namespace, pictures: int, cpus: dict[str, dict[str, str]], engines: Sequence[str]
) -> list[list[str]]:
    """dB, agreement and top-1 of each way; oneDNN reads its variable once, so each CPU needs a process."""
    rows = []
    for name in args.model:
        for engine in engines:
            prepare(args, name, engine)
            for cpu, environment in cpus.items():
                one = [
                    sys.executable,
                    __file__,
                    args.what,
                    "--data-path",
                    str(args.data_path),
                    "--work",
                    str(args.work),
                ]
                told = [*one, "--threads", str(args.threads), "--one", name, engine, str(pictures)]
                done = subprocess.run(told, env=os.environ | environment, check=True, stdout=subprocess.PIPE, text=True)
                for way, row in json.loads(done.stdout).items():
                    figures = [f"{row['sqnr_db']:.1f}", f"{row['agreement']:.2f}", f"{row['acc1']:.2f}"]
                    rows.append([name, engine, cpu, way, *figures])
                    print(*rows[-1], sep=" | ", flush=True)
    return rows


def latency(args: argparse.Namespace) -> list[list[str]]:
    from swin_quant.base.cpu import features
    from swin_quant.cards.card import versions

    cpu = f"{versions()['cpu']} ({', '.join(features(('avx2', 'avx512_vnni', 'amx_int8')))})"
    rows = []
    for name in args.model:
        for engine in args.engine:
            for batch in (1, 8):
                for way, row in measured(args, name, engine, 64, batch, args.rounds).items():
                    if row["failure"]:
                        raise SystemExit(f"{name}, {engine}, {way}: {row['failure']}")
                    speedup = f"{row['speedup']:.3f}" if row["speedup"] else ""
                    rows.append([name, cpu, engine, str(batch), way, f"{row['p50_ms']:.2f}", speedup])
                    print(*rows[-1], sep=" | ", flush=True)
    return rows


SECTIONS = {
    "choose": (
        "On training pictures, by fake-quant",
        "80 training pictures calibrate, 1,024 others are scored. *linears*: weights and inputs of linears, one range "
        "a row for weights. *fc2*: a zero point behind GELU.",
        ["model", "policy", *(f"{method}: {figure}" for method in METHODS for figure in ("dB", "agree %"))],
    ),
    "accuracy": (
        "On the 5,000 pictures of `val`, on the engines",
        "80 training pictures calibrate, by percentile; dB (SQNR of the logits) and agreement are with the float "
        "model. *safe*: `--saturation-safe`.",
        ["model", "engine", "CPU", "policy", "dB", "agree %", "acc@1"],
    ),
    "saturation": (
        "On a CPU without VNNI",
        "1,000 pictures of `val`, OpenVINO held to AVX2 by ONEDNN_MAX_CPU_ISA, where products saturate.",
        ["model", "engine", "CPU", "policy", "dB", "agree %", "acc@1"],
    ),
    "latency": (
        "Latency",
        "Milliseconds of a batch (median), and how many times as fast as without zero points, by rounds in turns.",
        ["model", "CPU", "engine", "batch", "policy", "ms", "speedup"],
    ),
}


def write_page(work: Path) -> None:
    """Write all sections that were measured, here or before."""
    before = {part.partition("\n")[0]: part for part in PAGE.read_text().split("\n## ")[1:]} if PAGE.exists() else {}
    lines = [
        "# Zero points",
        "",
        "Micro Swins of examples/checkpoints. Written by `python benchmarks/zero_points.py`.",
        "",
    ]
    for what, (title, words, columns) in SECTIONS.items():
        kept = work / f"{what}.json"
        if kept.exists():
            lines += [f"## {title}", "", words, "", line_of(columns), "|---" * len(columns) + "|"]
            lines += [line_of(row) for row in json.loads(kept.read_text())] + [""]
        elif title in before:
            lines += [f"## {before[title].rstrip()}", ""]
    save(PAGE, "\n".join(lines))


if __name__ == "__main__":
    main()
