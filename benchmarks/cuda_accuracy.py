"""What the CUDA engine's arithmetic costs, by the references of its kernels: writes docs/results/cuda_accuracy.md.

    python benchmarks/cuda_accuracy.py --data-path DIR [--pictures 5000] [--choose 1000]
    python benchmarks/cuda_accuracy.py --device cuda --data-path DIR [--cfg NAME --checkpoint FILE] [--output FILE]

DIR is CIFAR-10 as zip files and maps. 80 training pictures calibrate; `--choose` others say which form of softmax the
policy has, and the pictures of `val` are scored. The engine runs as it does on a CPU: what its kernels equal.

`--device cuda` puts the kernels on the GPU beside their references on the CPU, on the same pictures of `val`, and fails
where top-1 differs by more than 0.02 points and more than one picture. `--cfg` and `--checkpoint` name another float
model than those of examples/checkpoints, DIR is then its data; on a CPU its rows are printed, and no page is written.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from cuda_files import FLOAT, calibrated, exported, shown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "cuda_accuracy.md"
MODELS = ("swin_micro_cifar10", "swinv2_micro_cifar10")
JUDGED = (FLOAT, "cuda", "cuda-fp8", "ft-mode1", "ft-mode2")
BATCH, COMPILING = 100, 120.0  # pictures; seconds at most in which kernels are compiled before they are needed
MOST_APART = 0.02  # points of top-1 by which a GPU may differ from the references
COLUMNS = ("model", "engine", "policy", "acc@1", "Δ acc@1", "±", "agree %", "SQNR dB")
GPU_COLUMNS = ("model", "policy", "acc@1 of references", "acc@1 on the GPU", "Δ", "agree %", "SQNR dB")
HEAD = """# Accuracy of the CUDA engine's arithmetic

Micro Swins of examples/checkpoints, written by `python benchmarks/cuda_accuracy.py`; 80 training pictures calibrate.
*cuda*: the engine on a CPU, by the references that its kernels are tested against. Δ and ± (paired standard error) are
points of top-1 beside the float model in torch on the same pictures; agreement and SQNR of the logits are with it, too.
Speed is not measured here.
"""


def scored(config, weights, data_path: str, split: str, count: int, wanted: tuple[str, ...]) -> list[list[str]]:
    """Rows of a model on `count` pictures of a split, none of them those of calibration."""
    import torch

    from swin_quant.backends.cuda.engine import load
    from swin_quant.engines.scores import evaluate
    from swin_quant.engines.torch_engines import torch_engines
    from swin_quant.quant.policies import load_policy

    model, cfg, calibrating = calibrated(config, weights, data_path)
    name, batches = cfg.MODEL.NAME, shown(cfg, data_path, split, count, calibrating, BATCH)
    with tempfile.TemporaryDirectory() as folder:
        made = {each: load(artifact) for each, artifact in exported(model, cfg, wanted, folder).items()}
        engines = torch_engines(model, torch.device("cpu"), None, [load_policy("qdq")])
        labels = [("torch", engine.policy or "float32") for engine in engines.values()]
        labels += [("cuda", each) for each in made]
        start = time.process_time()
        with torch.inference_mode():
            scores = evaluate(engines | made, batches, torch.device("cpu"))
    print(f"{name}, pictures of {split}: {time.process_time() - start:.0f} s of CPU", flush=True)
    rows = []
    for (engine, policy), score in zip(labels, scores.values(), strict=True):
        delta = ["", "", "", ""] if policy == "float32" else [
            f"{score.delta_acc1:+.2f}", f"{score.delta_acc1_se:.2f}", f"{score.agreement:.2f}", decibels(score),
        ]  # fmt: skip
        rows.append([name, engine, policy, f"{score.acc1:.2f}", *delta])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def on_the_gpu(config, weights, data_path: str, count: int, wanted: tuple[str, ...], batch: int):
    """A row for each policy, and what is wrong: kernels on the GPU beside their references, on pictures of val."""
    from swin_quant.backends.cuda.engine import capability_here, load
    from swin_quant.engines.options import EngineOptions

    if capability_here() < 89:  # the first with float8
        wanted = tuple(each for each in wanted if each != "cuda-fp8")
    model, cfg, _ = calibrated(config, weights, data_path)
    batches, rows, wrong = shown(cfg, data_path, "val", count, set(), batch), [], []
    with tempfile.TemporaryDirectory() as folder:
        made = exported(model, cfg, wanted, folder)
        compile_all(made.values(), batch)
        for each, artifact in made.items():
            try:
                row, said = compared(load(artifact), load(artifact, EngineOptions(device="cuda")), batches)
            except Exception as error:  # one policy's failure does not hide what the others give
                row, said = ["-"] * 5, f"{type(error).__name__}: {str(error)[:300]}"
            rows.append([cfg.MODEL.NAME, each, *row])
            wrong += [f"{cfg.MODEL.NAME}, {each}: {said}"] if said else []
            print(*rows[-1], sep=" | ", flush=True)
    return rows, wrong


def compared(references, kernels, batches) -> tuple[list[str], str]:
    """Cells of a row, and what is wrong, if anything."""
    import torch

    from swin_quant.engines.scores import evaluate

    with torch.inference_mode():
        before, now = evaluate({"references": references, "GPU": kernels}, batches, torch.device("cpu")).values()
    most = max(MOST_APART, 100 / now.pictures)  # one picture is the least that can be told
    row = [f"{before.acc1:.2f}", f"{now.acc1:.2f}", f"{now.delta_acc1:+.2f}", f"{now.agreement:.2f}", decibels(now)]
    if abs(now.delta_acc1) <= most + 1e-9:
        return row, ""
    return row, f"top-1 differs from the references' by {now.delta_acc1:+.2f} points: {most:.2f} at most"


def compile_all(artifacts, batch: int) -> None:
    """The kernels of all of them for a batch, by several processes at once."""
    from swin_quant.backends.cuda.ahead import compile_ahead
    from swin_quant.backends.cuda.choosing import fused_program
    from swin_quant.backends.cuda.engine import capability_here, machine_here
    from swin_quant.backends.cuda.export import LARGEST_BATCH
    from swin_quant.backends.cuda.file import read_network
    from swin_quant.backends.cuda.sessions import sizes

    size = next(size for size in sizes(LARGEST_BATCH) if size >= batch)
    specs = [read_network(artifact.file).spec for artifact in artifacts]
    launches = [one for spec in specs for one in fused_program(spec, size, machine_here()).launches]
    made = compile_ahead(((one, None) for one in launches), capability_here(), COMPILING)
    print(f"{made.done} kernels compiled, {len(made.refused)} refused, {made.left} left", flush=True)


def decibels(score) -> str:
    return "equal" if score.sqnr_db is None else f"{score.sqnr_db:.1f}"


def table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--pictures", type=int, default=5000, help="of val")
    parser.add_argument("--choose", type=int, default=1000, help="of train")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--cfg", help="of another float model")
    parser.add_argument("--checkpoint", type=Path, help="its weights")
    parser.add_argument("--policies", nargs="+", choices=JUDGED, default=JUDGED, metavar="NAME")
    parser.add_argument("--batch", type=int, default=BATCH, help="on the GPU, where each size is compiled")
    parser.add_argument("--output", type=Path, help="the page of a GPU")
    args = parser.parse_args()
    if (args.cfg is None) != (args.checkpoint is None):
        parser.error("--cfg and --checkpoint: give both")
    if args.device == "cuda":
        return beside_references(args)
    final = [
        row for model in models(args) for row in scored(*model, args.data_path, "val", args.pictures, args.policies)
    ]
    if args.checkpoint:
        return
    forms = ("cuda, softmax half", "cuda, softmax int8")
    choosing = [row for model in models(args) for row in scored(*model, args.data_path, "train", args.choose, forms)]
    parts = [
        HEAD,
        f"## On {args.pictures} pictures of val\n",
        table(COLUMNS, final),
        "\n## Probabilities in int8 or half\n",
        f"What policy `cuda` has was chosen on {args.choose} training pictures that did not calibrate.\n",
        table(COLUMNS, choosing),
        "",
    ]
    PAGE.write_text("\n".join(parts))


def beside_references(args) -> None:
    """The page of a GPU. Ends with what differs, if anything does."""
    import torch
    from pages import versions_here

    from swin_quant.backends.cuda.engine import check_gpu
    from swin_quant.base.errors import SwinQuantError

    try:
        check_gpu()
    except SwinQuantError as error:
        sys.exit(f"cuda_accuracy.py: {error}: nothing was measured")
    found = [on_the_gpu(*model, args.data_path, args.pictures, args.policies, args.batch) for model in models(args)]
    page = "\n".join([
        f"# Accuracy of the CUDA engine on {torch.cuda.get_device_name()}\n",
        f"{versions_here()}; at most {args.pictures} pictures of val. *References*: the engine on the CPU, on the same "
        "ones; Δ, agreement and SQNR are with it.\n",
        table(GPU_COLUMNS, [row for rows, _ in found for row in rows]),
        "",
    ])  # fmt: skip
    print(page)
    if args.output:
        args.output.write_text(page)
    if wrong := [one for _, said in found for one in said]:
        sys.exit("\n".join(wrong))


def models(args) -> list[tuple[Path, Path]]:
    """Config and weights of each."""
    from swin_quant.config.files import find_config

    if args.checkpoint:
        return [(find_config(args.cfg), args.checkpoint)]
    folder = ROOT / "examples" / "checkpoints"
    return [(folder / f"{name}.yaml", folder / f"{name}.safetensors") for name in MODELS]


if __name__ == "__main__":
    main()
