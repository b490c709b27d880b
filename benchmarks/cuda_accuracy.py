"""What the CUDA engine's arithmetic costs, by the references of its kernels: writes docs/results/cuda_accuracy.md.

    python benchmarks/cuda_accuracy.py --data-path DIR [--pictures 5000] [--choose 1000]

DIR is CIFAR-10 as zip files and maps. 80 training pictures calibrate; `--choose` others say which form of softmax the
policy has, and the pictures of `val` are scored. The engine runs as it does on a CPU: what its kernels equal.
"""

import argparse
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "cuda_accuracy.md"
MODELS = ("swin_micro_cifar10", "swinv2_micro_cifar10")
FLOAT = "float16"
SOFTMAX = "role:softmax_output"
COLUMNS = ("model", "engine", "policy", "acc@1", "Δ acc@1", "±", "agree %", "SQNR dB")
HEAD = """# Accuracy of the CUDA engine's arithmetic

Micro Swins of examples/checkpoints, written by `python benchmarks/cuda_accuracy.py`; 80 training pictures calibrate.
*cuda*: the engine on a CPU, by the references that its kernels are tested against. Δ and ± (paired standard error) are
points of top-1 beside the float model in torch on the same pictures; agreement and SQNR of the logits are with it, too.
Speed is not measured here.
"""


def policies():
    """Those that the engine runs, by the names of the tables; None: its half form."""
    from swin_quant.quant.policies import load_policy
    from swin_quant.quant.policy import Rule

    half = load_policy("cuda").and_then(Rule(disable=(SOFTMAX,)))
    int8 = load_policy("cuda").and_then(Rule(enable=(SOFTMAX,)))
    return {
        FLOAT: None,
        "cuda": load_policy("cuda"),
        "cuda-fp8": load_policy("cuda-fp8"),
        "cuda, softmax half": half,
        "cuda, softmax int8": int8,
        "ft-mode1": load_policy("ft-mode1"),
        "ft-mode2": load_policy("ft-mode2"),
    }


def scored(name: str, data_path: Path, split: str, count: int, wanted: tuple[str, ...]) -> list[list[str]]:
    """Rows of a model on `count` pictures of a split, none of them those of calibration."""
    import torch

    from swin_quant.backends.cuda.engine import load
    from swin_quant.backends.cuda.export import CudaOptions, export
    from swin_quant.cards.card import RunCard
    from swin_quant.checkpoint import load_float
    from swin_quant.config import load_config
    from swin_quant.data.loader import load_batches
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.data.sampling import chunks, sample
    from swin_quant.data.sources import open_pictures
    from swin_quant.engines.scores import evaluate
    from swin_quant.engines.torch_engines import torch_engines
    from swin_quant.models import build_model
    from swin_quant.quant.calibration import Method, observe, set_ranges
    from swin_quant.quant.policies import load_policy
    from swin_quant.quant.policy import apply_policy

    cfg = load_config(ROOT / "examples" / "checkpoints" / f"{name}.yaml")
    model = build_model(cfg).eval()
    load_float(model, ROOT / "examples" / "checkpoints" / f"{name}.safetensors")
    preprocess, where = Preprocess.from_config(cfg), {"zip_mode": True, "cache_mode": "no", "num_classes": 10}
    train, pictures = (open_pictures(str(data_path), each, **where) for each in ("train", split))
    calibrating = sample(len(train), 80, 0)
    batches = load_batches(train, preprocess, chunks(calibrating, 8))
    set_ranges(model, observe(model, [batch.images for batch in batches]), Method("percentile"))
    step = max(1, len(pictures) // count)
    scored_on = [i for i in range(0, len(pictures), step) if split != "train" or i not in set(calibrating)][:count]
    shown = list(load_batches(pictures, preprocess, chunks(scored_on, 100)))
    with tempfile.TemporaryDirectory() as folder:
        made = {}
        for each, policy in policies().items():
            if each in wanted and not (each == "ft-mode2" and cfg.MODEL.TYPE == "swinv2"):
                chosen = policy or load_policy("float")
                apply_policy(model, chosen)
                card = RunCard(f"{name} {each}", {}, {}, policy=chosen.to_dict())
                options = CudaOptions(precision="int8" if policy else "float")
                made[each] = load(export(model, card, Path(folder), options))
        engines = torch_engines(model, torch.device("cpu"), None, [load_policy("qdq")])
        labels = [("torch", engine.policy or "float32") for engine in engines.values()]
        labels += [("cuda", each) for each in made]
        start = time.process_time()
        with torch.inference_mode():
            scores = evaluate(engines | made, shown, torch.device("cpu"))
    print(f"{name}, {len(scored_on)} pictures of {split}: {time.process_time() - start:.0f} s of CPU", flush=True)
    rows = []
    for (engine, policy), score in zip(labels, scores.values(), strict=True):
        delta = ["", "", "", ""] if policy == "float32" else [
            f"{score.delta_acc1:+.2f}", f"{score.delta_acc1_se:.2f}", f"{score.agreement:.2f}", f"{score.sqnr_db:.1f}",
        ]  # fmt: skip
        rows.append([name, engine, policy, f"{score.acc1:.2f}", *delta])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def table(rows: list[list[str]]) -> str:
    return "\n".join(
        [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=5000, help="of val")
    parser.add_argument("--choose", type=int, default=1000, help="of train")
    args = parser.parse_args()
    forms = ("cuda, softmax half", "cuda, softmax int8")
    choosing = [row for name in MODELS for row in scored(name, args.data_path, "train", args.choose, forms)]
    judging = (FLOAT, "cuda", "cuda-fp8", "ft-mode1", "ft-mode2")
    final = [row for name in MODELS for row in scored(name, args.data_path, "val", args.pictures, judging)]
    parts = [
        HEAD,
        f"## On {args.pictures} pictures of val\n",
        table(final),
        "\n## Probabilities in int8 or half\n",
        f"What policy `cuda` has was chosen on {args.choose} training pictures that did not calibrate.\n",
        table(choosing),
        "",
    ]
    PAGE.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
