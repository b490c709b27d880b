"""Swin, or any model of timm, on CPU engines, in one interleaved run: our files beside NNCF's and ONNX Runtime's own.

    python benchmarks/cpu_engines.py [--model swin_tiny_patch4_window7_224 | timm:resnet50] [--work DIR] [--batch 1 8]
        [--rounds 5] [--operators [--size 224 320] [--cpu-time]] [--without-amx] [--passes fast]
        [--no-torch] [--output docs/results/any_model.md] [--record]

Weights are random and seeded, with one-dimensional parameters disturbed so that nothing folds away. Calibration and
comparison run on seeded noise: latency is real, and agreement shows what the arithmetic loses. Every other tool's
candidate starts from the plain float graph of the same weights. NNCF is measured if it is installed (`pip install
nncf`). Files in the working folder are not made again.

--operators: instead, our file without compiled operators, with attention, and with the MLP, too; for pictures of
another --size, height and width, with both branches, then the rest: one that windows do not fill is padded. Of a model
of timm with its MLPs, then with its attention, too, and NNCF's files.
--cpu-time: instead of latency the CPU time of a process that runs these files in turns, on one thread by default. Other
programs on the machine change it little.
--without-amx: as on a CPU that has AVX-512 with VNNI and bfloat16, but no AMX: tests/standin/older_cpu.c hides it from
every library.
ONEDNN_MAX_CPU_ISA=AVX2 or AVX2_VNNI in front: as on a CPU with vectors of 256 bits, for OpenVINO and our operators.
--passes: passes after our files' calibration, since NNCF's default has some; they cost calibration, not latency.
--no-torch: without torch.jit.trace and torch.compile, whose compilation takes minutes a row.
Files with attention as the compiled operator are measured beside plain ones if it runs (docs/custom_operators.md).
"""

import argparse
import os
import subprocess
import sys
import time
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median

import torch
from cpu_page import OPERATORS, OPERATORS_OF_ANY, Run, record
from cpu_rivals import CALIBRATION, nncf_candidates, own_quantization, seeded, torch_candidates
from measuring import BenchCandidate, BenchPlan, bench_table, measure, noise
from pages import ROOT, cpu, place, script_parser

import swin_quant as sq
from swin_quant.backends.artifact import Artifact
from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.openvino.engine import float_types
from swin_quant.backends.openvino.operators import LIMIT, are_faster_here
from swin_quant.backends.registry import artifact_engine, engine_named, torch_engine
from swin_quant.base.cpu import INT8_PRODUCTS, reproducible, usable_cores, within
from swin_quant.base.files import compute_sha256
from swin_quant.base.progress import set_up
from swin_quant.cards.card import RunCard
from swin_quant.checkpoint import save_calibrated
from swin_quant.config import find_config, load_config
from swin_quant.config.load import portable_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.models import build_model
from swin_quant.models.classifier import Classifier
from swin_quant.models.layers import Swin
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.layer import QuantConv2d, weighted_layers
from swin_quant.quant.policy import apply_policy, load_policy
from swin_quant.report.table import NARROW, markdown, terminal
from swin_quant.score.engine import EAGER
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import difference

REFERENCE = f"{EAGER} float32"  # the candidate whose logits are the reference
MODEL, BATCHES, ROUNDS, SECONDS = "swin_tiny_patch4_window7_224", [1, 8], 5, 1.0  # defaults
PLUGINS = ("attention=swin_quant::Attention", "mlp=swin_quant::Mlp")
BRANCHES = ("attention_branch=swin_quant::AttentionBranch", PLUGINS[1])
MERGING = (*BRANCHES, "patch_merging=swin_quant::PatchMerging")
ALL = (*MERGING, "patch_embedding=swin_quant::PatchEmbedding")
ON_MAPS = ("map_branch=swin_quant::MapBranch", PLUGINS[1])
COMPILED = (
    ("cpu-operators", "bfloat16", ALL),
    ("cpu-operators", "bfloat16", MERGING),
    ("cpu-operators", "bfloat16", BRANCHES),
    ("cpu-operators", "bfloat16", PLUGINS),
    ("cpu-operators", "bfloat16", PLUGINS[:1]),
    ("cpu-operators", None, PLUGINS[:1]),
    ("cuda", "bfloat16", PLUGINS[:1]),
    ("qdq", "bfloat16", PLUGINS[:1]),
)
NAMES = {
    ALL: "compiled branches, merging and embedding",
    MERGING: "compiled branches and merging",
    BRANCHES: "compiled branches",
    PLUGINS: "compiled attention and MLP",
    PLUGINS[:1]: "compiled attention",
}
BY_OPERATORS = {OPERATORS[0]: ("cpu", ())} | {
    name: ("cpu-operators", plugins)
    for name, plugins in zip(OPERATORS[1:], (PLUGINS[:1], PLUGINS, BRANCHES, MERGING, ALL), strict=True)
}
TOKENS = ("token_branch=swin_quant::TokenBranch", PLUGINS[1])
BY_OPERATORS_OF_ANY = dict(
    zip(OPERATORS_OF_ANY, [("cpu", ()), ("cpu", PLUGINS[1:]), ("cpu-operators", TOKENS)], strict=True)
)
BY_OPERATORS_ON_MAPS = {OPERATORS[0]: ("cpu", ())} | {
    name: ("cpu-operators", plugins)
    for name, plugins in zip(OPERATORS[3:], (ON_MAPS, (*ON_MAPS, ALL[2]), (*ON_MAPS, *ALL[2:])), strict=True)
}
AMX = ("amx_int8", "amx_bf16")
FIELDS = ("batch", "candidate", "p50_ms", "p90_ms", "speedup", "peak_mb", "file_mb", "int8_gemms", "all_gemms",
          "sqnr_db", "agreement", "failure")  # fmt: skip


def main() -> None:
    reproducible()
    parser = script_parser(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--work", type=Path, help="out/cpu_engines/MODEL, unless given")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--threads", type=int, help="all that the machine has, unless given; with --cpu-time one")
    parser.add_argument("--operators", action="store_true", help="our files with more and more compiled operators")
    parser.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="of the pictures, with --operators")
    parser.add_argument("--cpu-time", action="store_true", help="with --operators: CPU time, not latency")
    parser.add_argument("--without-amx", action="store_true", help="as a CPU without AMX runs it")
    parser.add_argument("--no-torch", action="store_true", help="without PyTorch's own ways")
    parser.add_argument("--passes", help="behind our calibration: best, fast, or a YAML file")
    parser.add_argument("--note", default="", help="a sentence for the page: what ran beside")
    parser.add_argument("--output", type=Path, help="a page for a section with this run's table")
    parser.add_argument("--record", action="store_true", help="into docs/results/cpu_engines.json and its page")
    args = parser.parse_args()
    set_up()
    if (args.size or args.cpu_time) and not args.operators:
        parser.error("--size and --cpu-time are for --operators")
    apart = args.model.replace(":", "_") + ("_{}x{}".format(*args.size) if args.size else "")
    args.work = args.work or Path("out/cpu_engines") / apart  # a folder for each model
    args.threads = args.threads or (1 if args.cpu_time else usable_cores())
    args.work.mkdir(parents=True, exist_ok=True)
    if args.without_amx:
        hide_amx(args.work)
    model, card, checkpoint = calibrated(args.model, args.work, args.size)
    is_on_maps = bool(args.size) and isinstance(model, Swin)
    rewrites = frozenset({"any-size"} if is_on_maps else ())  # which maps cannot do without
    plain = exported(model, card, args.work / "plain", OnnxOptions(precision="float", rewrites=rewrites))
    reference = BenchCandidate(REFERENCE, partial(torch_engine, str(checkpoint), card.config), checkpoint)
    better, folder = model, args.work
    if args.passes:  # of a copy, so that the float model does not change
        batches = seeded(CALIBRATION, model.input_shape[1]).split(8)
        better = sq.calibrate(deepcopy(model), batches, "qdq", passes=args.passes).module
        folder = args.work / f"passes_{Path(args.passes).stem}"
    if args.operators:
        candidates = [
            reference,
            on("openvino", plain, "openvino float32", threads=args.threads),
            *one_by_one(better, card, folder, is_on_maps, args.threads),
        ]
        if not isinstance(model, Swin):
            how = model.input_shape[1], is_convolutional(model), args.threads
            candidates += nncf_candidates(str(plain.file), args.work, *how)
        if args.cpu_time:
            return measure_cpu_time(args, candidates[1:], model.input_shape)
    else:
        convolutional, float_file, side = is_convolutional(model), str(plain.file), model.input_shape[1]
        candidates = [
            reference,
            *([] if args.no_torch else torch_candidates(checkpoint, card.config)),
            on("openvino", plain, "openvino float32"),
            on("openvino", plain, "openvino bfloat16", "bfloat16"),
            *nncf_candidates(float_file, args.work, side, convolutional),
            on("onnxruntime", plain, "onnxruntime float32"),
            own_quantization(float_file, args.work, side),
            *([own_quantization(float_file, args.work, side, everything=True)] if convolutional else []),
            *ours(better, card, folder, not args.without_amx),
        ]
    plan = BenchPlan(tuple(args.batch), args.rounds, args.seconds, args.threads)
    report = measure(args.model, candidates, plan, noise(16, model.input_shape))
    hidden = {*AMX} if args.without_amx else set()
    if LIMIT in os.environ:
        hidden |= set(INT8_PRODUCTS) - set(within(os.environ[LIMIT]))
    int8, bfloat16 = (
        [name for name in names if name not in hidden] for names in (report.int8_features, report.bfloat16_features)
    )
    report = replace(report, int8_features=int8, bfloat16_features=bfloat16)
    print(terminal(bench_table(report), 2 * NARROW))
    if args.output:
        title = f"Latency of {args.model} on {cpu()}{', without AMX' if args.without_amx else ''}"
        place(args.output, title, f"{markdown(bench_table(report))}\n* Written by `{command(args)}`.")
    if args.record:
        libraries = dict.fromkeys(name for row in report.rows if row.library for name in row.library.split(", "))
        versions = ", ".join([f"torch {torch.__version__}", *libraries])
        rows = [{field: getattr(row, field) for field in FIELDS} for row in report.rows]
        found = {"seconds": args.seconds, "int8": int8, "bfloat16": bfloat16, "versions": versions, "rows": rows}
        record(circumstances(args) | found)


def hide_amx(folder: Path) -> None:
    """Start this program again with AMX hidden from CPUID, unless it is hidden; SystemExit if that cannot be done."""
    if os.environ.get("OLDER_CPU") == "vnni":
        return
    source, library = ROOT / "tests" / "standin" / "older_cpu.c", (folder / "older_cpu.so").resolve()
    hidden = os.environ | {"OLDER_CPU": "vnni", "LD_PRELOAD": str(library)}
    try:
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        subprocess.run(["true"], env=hidden, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"--without-amx: CPUID cannot be changed here: {error}") from error
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.argv], hidden)


def ours(model: Classifier, card: RunCard, folder: Path, amx: bool) -> list[BenchCandidate]:
    """Our int8 files, by engine, policy and float type; then, where they are fast, with compiled operators."""
    wanted: list[tuple[str, str, str | None, tuple[str, ...]]] = [
        ("openvino", "cpu", None, ()),
        ("openvino", "cpu", "bfloat16", ()),
        *([("openvino", "cpu-amx", "bfloat16", ())] if amx and isinstance(model, Swin) else []),
        ("openvino", "qdq", "bfloat16", ()),
        ("onnxruntime", "cpu", None, ()),
        ("onnxruntime", "qdq", None, ()),
        ("onnxruntime", "onnxruntime", None, ()),
    ]
    if are_faster_here(model.architecture.family.name):
        wanted += [("openvino", *one) for one in COMPILED]
    candidates = []
    for target, policy, float_type, plugins in wanted:
        name = f"{target} int8 {policy}, ours{f' +{float_type}' if float_type else ''}"
        place = folder
        if plugins:
            name, place = f"{name}, {NAMES[plugins]}", folder / NAMES[plugins].replace(" ", "_")
        options = OnnxOptions(target=target, plain=not plugins, plugin=plugins)
        candidates.append(on(target, exported(model, card, place, options, policy), name, float_type))
    return candidates


def one_by_one(model: Classifier, card: RunCard, folder: Path, on_maps: bool, threads: int) -> list[BenchCandidate]:
    """Our int8 files without operators, with attention, and with the MLP, too; on maps, without and with both."""
    candidates = []
    own = BY_OPERATORS if isinstance(model, Swin) else BY_OPERATORS_OF_ANY
    float_type = "bfloat16" if "bfloat16" in float_types() else None
    for name, (policy, plugins) in (BY_OPERATORS_ON_MAPS if on_maps else own).items():
        options = OnnxOptions(target="openvino", plain=not plugins, plugin=plugins)
        artifact = exported(model, card, folder / name.replace(" ", "_"), options, policy)
        candidates.append(on("openvino", artifact, name, float_type, threads))
    return candidates


def measure_cpu_time(args: argparse.Namespace, candidates: list[BenchCandidate], shape: tuple[int, ...]) -> None:
    """Print the CPU time of each file, a median over rounds, and record it if that is asked for."""
    images = noise(16, shape)
    engines = {one.name: one.load() for one in candidates}
    logits = {name: engine(images) for name, engine in engines.items()}
    exact = logits[candidates[0].name]
    rows = []
    for batch in args.batch:
        given = images[:batch]
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(args.rounds + 1):
            for name, engine in engines.items():
                start = time.process_time()
                for _ in range(max(8 // batch, 1)):
                    engine(given)
                times[name].append(1000 * (time.process_time() - start) / max(8 // batch, 1))
        for name, found in times.items():
            row = {"batch": batch, "candidate": name, "p50_ms": median(found[1:])}  # the first one warms up
            row["sqnr_db"] = difference(logits[name], exact)["sqnr_db"]
            print(row)
            rows.append(row)
    if args.record:
        versions = f"torch {torch.__version__}, openvino {metadata.version('openvino')}"
        has = [name for name in INT8_PRODUCTS if torch.cpu.get_capabilities().get(name)]
        known = {"cpu_time": True, "seconds": 0, "int8": has, "bfloat16": [], "versions": versions, "rows": rows}
        record(circumstances(args) | known)


def circumstances(args: argparse.Namespace) -> Run:
    """What is known of a run before it is measured."""
    return {
        "cpu": cpu(),
        "without_amx": args.without_amx,
        **({"operators": True} if args.operators else {}),
        **({"size": args.size} if args.size else {}),
        **({"limit": os.environ[LIMIT]} if LIMIT in os.environ else {}),
        "model": args.model,
        "command": command(args),
        "note": args.note,
        "date": time.strftime("%F"),
        "threads": args.threads,
        "rounds": args.rounds,
    }


def command(args: argparse.Namespace) -> str:
    """The command line that makes this run again."""
    defaults = {"model": MODEL, "batch": BATCHES, "rounds": ROUNDS, "seconds": SECONDS}
    words = [LIMIT + "=" + os.environ[LIMIT]] if LIMIT in os.environ else []
    words.append("python benchmarks/cpu_engines.py")
    for name in "model batch rounds seconds operators cpu_time without_amx no_torch passes size".split():
        value = getattr(args, name)
        if value and value != defaults.get(name):
            shown = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, shown)]
    return " ".join(words)


def calibrated(name: str, folder: Path, size: list[int] | None = None) -> tuple:
    """A model of random weights with ranges, for pictures of its own size or another, its card, and its checkpoint."""
    cfg = load_config(find_config(name), overrides={"DATA.IMG_SIZE": size} if size else None)
    torch.manual_seed(0)
    model = build_model(cfg)
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1:
            spread = 0.1 if key.endswith("weight") else 0.02
            parameter.data.add_(spread * torch.randn(parameter.shape))
    apply_policy(model, load_policy("qdq"))
    calibrate(model, seeded(CALIBRATION, cfg.DATA.IMG_SIZE).split(8), Method())
    file = folder / f"{name.replace(':', '_')}_calib.pth"
    save_calibrated(model, file)
    record = {"file": file.name, "sha256": compute_sha256(file)}
    preprocess = Preprocess.from_config(cfg).to_dict()
    return model, RunCard(cfg.MODEL.NAME, portable_config(cfg), preprocess, checkpoint=record), file


def is_convolutional(model: Classifier) -> bool:
    """Whether most layers are convolutions, for which ONNX Runtime and NNCF have other settings."""
    kinds = [isinstance(layer, QuantConv2d) for layer in weighted_layers(model).values()]
    return 2 * sum(kinds) > len(kinds)


def exported(
    model: Classifier, card: RunCard, folder: Path, options: OnnxOptions, policy: str | None = None
) -> Artifact:
    """The export in `folder`, or in a folder of its policy there, made now if it is missing."""
    if policy:
        card, folder = replace(card, policy=load_policy(policy).to_dict()), folder / policy
    file = folder / f"{card.name}_{options.suffix('int8')}.onnx"
    return open_artifact(file) if file.with_suffix(".json").exists() else export(model, card, folder, options)


def on(
    engine: str, artifact: Artifact, name: str, float_type: str | None = None, threads: int | None = None
) -> BenchCandidate:
    """An artifact on an engine, compared with the plain float32 graph on the same engine."""
    options = EngineOptions(threads or usable_cores(), float_type)
    load = partial(artifact_engine, str(artifact.file), engine_named(engine), options)
    return BenchCandidate(name, load, artifact.file, f"{engine} float32")


if __name__ == "__main__":
    main()
