"""The loss on CPUs without VNNI, with and without --saturation-safe: writes docs/results/saturation.md.

    python benchmarks/saturation.py --data-path CIFAR10_FOLDER [--pictures 1000] [--work DIR] [--no-latency]

The micro Swins of examples/checkpoints are calibrated on 80 training pictures, exported under policy `cpu` with 8 and
with 7 bits for weights, and run on pictures of `val` (zipped, as in examples/checkpoints/README.md). A process sees one
CPU: this one, or an imitation of an older one, for OpenVINO by ONEDNN_MAX_CPU_ISA, for ONNX Runtime by
tests/standin/older_cpu.c if there is a C compiler. The kernels are the real ones, and so are latencies, on a quiet
machine. --no-latency leaves them out.
"""

import argparse
import json
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import torch
from pages import EXAMPLES, RESULTS, older_cpu, save, script_parser, swin_quant

from swin_quant.backends.registry import artifact_engine, engine_named, torch_engine
from swin_quant.base.cpu import reproducible, usable_cores
from swin_quant.base.files import json_text
from swin_quant.cards.card import RunCard, versions
from swin_quant.cards.paths import card_path
from swin_quant.report.engines import bench_data
from swin_quant.score.bench import BenchPlan, BenchReport, load_pictures, measure
from swin_quant.score.candidate import BenchCandidate
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.bench_candidates import REFERENCE

MICRO = ("swin_micro_cifar10", "swinv2_micro_cifar10")
WAYS = {"plain": [], "safe": ["--saturation-safe"]}
OPENVINO = {"AVX2 with VNNI": "AVX2_VNNI", "AVX-512 without VNNI": "AVX512_CORE", "AVX2": "AVX2"}
ONNXRUNTIME = {"AVX-512 without VNNI": "avx512", "AVX2": "avx2"}
FAKE_QUANT, OWN = "torch fake-quant", "onnxruntime, default session"


def main() -> None:
    reproducible()
    parser = script_parser(__doc__)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--work", type=Path, default=Path("out/saturation"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--no-latency", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "saturation.md")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "ENGINE"), help=argparse.SUPPRESS)  # for the child process
    args = parser.parse_args()
    if args.one:
        print(json_text(bench_data(measured(*args.one, args))))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for model in MICRO:
        prepare(model, args)
        for engine, cpu, environment in imitations(args.work):
            told = [sys.executable, __file__, *sys.argv[1:], "--one", model, engine]
            print(model, engine, cpu, flush=True)
            done = subprocess.run(told, env=os.environ | environment, check=True, stdout=subprocess.PIPE, text=True)
            found = {row["candidate"]: row for row in json.loads(done.stdout)["rows"]}
            rows.append(cells(model, engine, cpu, found["plain"], found["safe"], args.no_latency))
            if "own session" in found:
                rows.append(cells(model, OWN, cpu, found["own session"], found["safe"], args.no_latency))
    save(args.output, heading(args) + "".join(f"| {' | '.join(row)} |\n" for row in rows))


@cache
def imitations(work: Path) -> list[tuple[str, str, dict[str, str]]]:
    """Engine, CPU, and the environment that imitates it, if that works here."""
    found = [(FAKE_QUANT, "any", {}), ("openvino", "this one", {})]
    found += [("openvino", cpu, {"ONEDNN_MAX_CPU_ISA": isa}) for cpu, isa in OPENVINO.items()]
    found.append(("onnxruntime", "this one", {}))
    try:
        return found + [("onnxruntime", cpu, older_cpu(work, kind)) for cpu, kind in ONNXRUNTIME.items()]
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"ONNX Runtime is not run on older CPUs: {error}")
        return found


def prepare(model: str, args: argparse.Namespace) -> None:
    """Calibrate and export whatever is missing."""
    source, data = EXAMPLES / model, ["--data-path", args.data_path, "--zip"]
    calibrated = args.work / f"{model}_calib.pth"
    if not calibrated.with_suffix(".json").exists():
        told = ["--policy", "cpu", "--output", args.work]
        swin_quant("calibrate", "--cfg", f"{source}.yaml", "--checkpoint", f"{source}.safetensors", *data, *told)
    for engine in ("openvino", "onnxruntime"):
        for way, flags in WAYS.items():
            if not artifact(args.work, model, engine, way).exists():
                told = ["--for", engine, "--policy", "cpu", *flags, "--output", args.work / way]
                swin_quant("export", "--checkpoint", calibrated, *told)


def artifact(work: Path, model: str, engine: str, way: str) -> Path:
    return work / way / f"{model}_{'w7a8' if '--saturation-safe' in WAYS[way] else 'int8'}_{engine}.onnx"


def measured(model: str, engine: str, args: argparse.Namespace) -> BenchReport:
    """The plain and the safe file against the float model, in this process's environment."""
    checkpoint = args.work / f"{model}_calib.pth"
    config = RunCard.read(card_path(checkpoint)).config
    candidates = [BenchCandidate(REFERENCE, partial(torch_engine, str(checkpoint), config), checkpoint)]
    for way in WAYS:
        if engine == FAKE_QUANT:
            load = partial(simulated, str(checkpoint), config, way)
        else:
            file = str(artifact(args.work, model, engine, way))
            load = partial(artifact_engine, file, engine_named(engine), EngineOptions(args.threads))
        candidates.append(BenchCandidate(way, load, None, "plain" if way == "safe" else None))
    if engine == "onnxruntime" and "OLDER_CPU" in os.environ:
        file = str(artifact(args.work, model, engine, "plain"))
        candidates.append(BenchCandidate("own session", partial(own_session, file, args.threads), None))
    quick = (1, 0.001) if args.no_latency else (args.rounds, 1.0)
    shown = load_pictures(str(checkpoint), str(args.data_path), "val", True, args.pictures)
    return measure(model, candidates, BenchPlan((args.batch,), *quick, args.threads), shown)


def simulated(checkpoint: str, config: dict, way: str) -> Engine:
    """Fake-quant with a file's arithmetic."""
    from swin_quant.backends.saturation import without_saturation
    from swin_quant.checkpoint import load_calibrated
    from swin_quant.config import from_dict
    from swin_quant.models import build_model
    from swin_quant.quant.policy import load_policy
    from swin_quant.score.engine import torch_engines

    model, policy = build_model(from_dict(config, checkpoint)), load_policy("cpu")
    load_calibrated(model, checkpoint)
    chosen = without_saturation(policy) if way == "safe" else policy
    return list(torch_engines(model, torch.device("cpu"), None, [chosen]).values())[-1]


def own_session(file: str, threads: int) -> Engine:
    """ONNX Runtime as used without knowing its option."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return Engine("onnxruntime", "int8", "cpu", partial(run_session, session))


def run_session(session, images: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def cells(model: str, engine: str, cpu: str, plain: dict, safe: dict, no_latency: bool) -> list[str]:
    ms = ["", ""] if no_latency or engine == FAKE_QUANT else [f"{row['p50_ms']:.2f}" for row in (plain, safe)]
    accuracy = [f"{row[key]:.{digits}f}" for key, digits in (("sqnr_db", 1), ("agreement", 1), ("acc1", 1))
                for row in (plain, safe)]  # fmt: skip
    return [model, engine, cpu, *accuracy, *ms]


def heading(args: argparse.Namespace) -> str:
    columns = ["model", "engine", "CPU"]
    columns += [f"{figure}{way}" for figure in ("dB", "agree %", "acc@1", "ms") for way in ("", ", safe")]
    ways = "is not measured yet" if args.no_latency else f"is of a batch of {args.batch}, {args.threads} threads"
    used = versions()
    return (
        "# CPUs without VNNI, and weights of 7 bits\n\n"
        f"Policy `cpu`, {args.pictures} pictures of CIFAR-10's `val`; dB (SQNR) and agreement are with the float "
        "model. *safe*: `export --saturation-safe`. *default session*: the plain file without "
        "`session.x64quantprecision`, which our engine sets on such CPUs. Older CPUs are imitated: OpenVINO by "
        "ONEDNN_MAX_CPU_ISA, ONNX Runtime by a library that hides later instructions (tests/standin/older_cpu.c). "
        f"Latency {ways}. {used['cpu']}, torch {used['torch']}. Written by `python benchmarks/saturation.py`.\n\n"
        f"| {' | '.join(columns)} |\n|{'---|' * 3}{'---:|' * 8}\n"
    )


if __name__ == "__main__":
    main()
