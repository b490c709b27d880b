"""PTQ on real pictures, start to end: writes the tables of docs/results/.

    python benchmarks/ptq.py accuracy --shared DIR [--work DIR]
    python benchmarks/ptq.py bits --shared DIR
    python benchmarks/ptq.py fullsize --shared DIR [--work DIR]

accuracy: the micro Swin V1 and V2 of DIR/checkpoints and, better trained, of examples/checkpoints, on
DIR/data/cifar10, with both int8 modes and `qdq`, all calibrators, and `calibrate`'s warnings.
bits: the two better trained models on training pictures only, at 8 to 4 bits: the default calibrator and the limits of
warnings were chosen by this.
fullsize: randomly initialised Swin-T and SwinV2-T on the pictures of DIR/data/imagenet_sample: wall time and peak
memory of the whole process, including the import of torch.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from pages import EXAMPLES, RESULTS, batches_of, cifar10, float_model, line_of, save, script_parser

CALIBRATORS = ("max", "percentile", "mse", "entropy")
MICRO = ("swin_micro_cifar10", "swinv2_micro_cifar10")
FULL = ("swin_tiny_patch4_window7_224", "swinv2_tiny_patch4_window8_256")
POLICIES = ("ft-mode1", "ft-mode2", "qdq")
BITS = ((8, 8), (8, 7), (8, 6), (8, 5), (8, 4), (4, 8), (4, 4))  # bits of weights and activations


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("what", choices=("accuracy", "bits", "fullsize"))
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("out/ptq"))
    args = parser.parse_args()
    {"accuracy": accuracy, "bits": bits, "fullsize": fullsize}[args.what](args.shared, args.work)


def models(shared: Path) -> dict[str, tuple[Path, Path]]:
    """Configuration and weights by title; the better trained models first."""
    folders = {
        "example": (EXAMPLES, "safetensors"),
        "reference": (shared / "checkpoints", "pth"),
    }
    return {
        f"{name} ({title})": (folder / f"{name}.yaml", folder / f"{name}.{suffix}")
        for title, (folder, suffix) in folders.items()
        for name in MICRO
    }


def accuracy(shared: Path, work: Path) -> None:
    page = ["# PTQ on CIFAR-10, micro Swin V1 and V2", "", ACCURACY]
    table = []
    for title, (config, weights) in models(shared).items():
        cards, said = [], []
        for calibrator in CALIBRATORS:
            output = work / title.replace(" ", "_").strip("()") / calibrator
            data = ["--data-path", str(shared / "data" / "cifar10"), "--zip", "--batch", "200"]
            how = ["--calibrator", calibrator, "--policy", *POLICIES, "--output", str(output)]
            kept = output / "warnings.json"  # of a run that was cut off
            if not kept.exists():
                found = warnings("calibrate", "--cfg", str(config), "--checkpoint", str(weights), *data, *how)
                kept.write_text(json.dumps(found))
            said += json.loads(kept.read_text())
            cards.append(str(output / f"{weights.stem}_calib.json"))
        swin_quant("report", *cards, "--output", str(work / "table"))
        head, *rows = (work / "table" / "accuracy.csv").read_text().splitlines()
        table += [f"model,{head}"] * (not table) + [f"{title},{row}" for row in rows]
        if said:
            page += [f"## {title}", "", "`calibrate` said:", "", *(f"> {line}\n>" for line in said), ""]
    (RESULTS / "ptq_cifar10.md").write_text("\n".join(page))
    (RESULTS / "ptq_cifar10.csv").write_text("\n".join(table) + "\n")


_SHOWN = "model, policy, calibrator, acc1, quantized_acc1, delta_acc1, agreement, sqnr_db"
ACCURACY = f"""80 training pictures calibrate, the 5,000 of `val` score. The epoch of the examples was chosen on
these, which flatters float there, and so counts a little against every row. Latencies were taken beside other work:
compare accuracy, agreement and SQNR only. Written by `python benchmarks/ptq.py accuracy`.

Table: [ptq_cifar10.csv](ptq_cifar10.csv): {_SHOWN}.

Percent; delta_acc1: points against float32 ± paired standard error; agreement and sqnr_db: with float32. `make site`
shows the table here.
"""


def bits(shared: Path, work: Path) -> None:
    lines = [CHOICE]
    head = ["bits", *(f"{name}: dB" for name in CALIBRATORS), *(f"{name}: agree, lost" for name in CALIBRATORS)]
    better_trained = [files for title, files in models(shared).items() if "example" in title]
    for config, weights in better_trained:
        for policy in ("ft-mode1", "qdq"):
            lines += [f"## {config.stem}, {policy}", "", line_of(head), "|---" * len(head) + "|"]
            kept = work / "bits" / f"{config.stem} {policy}.json"  # of a run that was cut off
            if not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(rows_of_bits(config, weights, shared / "data" / "cifar10", policy)))
            for row in json.loads(kept.read_text()):
                lines.append(line_of(row))
                print(lines[-1], flush=True)
            lines.append("")
    save(RESULTS / "calibrators.md", "\n".join(lines))


CHOICE = """# Which calibrator at how many bits, on training pictures

80 training pictures calibrate. dB: SQNR of the logits on the first 32 of them, which is what `calibrate` looks at.
Agreement with float and top-1 accuracy lost, in points, are of 1,024 other training pictures. From here come the
default calibrator and the limits in `swin_quant/quant/check.py`; no picture of `val` was seen. Written by
`python benchmarks/ptq.py bits`.
"""


def rows_of_bits(config: Path, weights: Path, data: Path, policy: str) -> list[list[str]]:
    from swin_quant.data.sampling import sample
    from swin_quant.quant.calibration import Method, observe, set_ranges
    from swin_quant.quant.check import PICTURES
    from swin_quant.quant.policy import Rule, apply_policy, dequantize, load_policy, quantize
    from swin_quant.score.difference import difference

    cfg, model = float_model(config, weights)
    pictures = cifar10(data, "train")
    chosen = sample(len(pictures), 2048, 0)
    seen, others = (batches_of(pictures, cfg, indices, 8) for indices in (chosen[:80], chosen[1024:]))
    labels = torch.cat([batch.labels for batch in others])

    def logits(batches: list) -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat([model(batch.images) for batch in batches])

    first = seen[: PICTURES // 8]
    expected_first, expected = logits(first), logits(others)
    right = (expected.argmax(1) == labels).double().mean()
    calibration = observe(model, [batch.images for batch in seen])
    rows = []
    for of_weights, of_activations in BITS:
        rules = (
            Rule(nodes=("role:gemm_weight",), bits=of_weights),
            Rule(nodes=("role:activation",), bits=of_activations),
        )
        chosen_policy = load_policy(policy).and_then(*rules)
        decibels, losses = [], []
        for name in CALIBRATORS:
            apply_policy(model, chosen_policy)
            set_ranges(model, calibration, Method(name))
            apply_policy(model, chosen_policy)
            quantize(model)
            near, far = difference(logits(first), expected_first), logits(others)
            dequantize(model)
            decibels.append(f"{near['sqnr_db']:.1f}")
            lost = 100 * (right - (far.argmax(1) == labels).double().mean()).item()
            losses.append(f"{difference(far, expected)['agreement']:.1f} %, {lost:.1f}")
        rows.append([f"W{of_weights}A{of_activations}", *decibels, *losses])
    return rows


def warnings(*arguments: str) -> list[str]:
    """Run the command and return the warnings that it printed."""
    with tempfile.TemporaryFile() as errors:
        swin_quant(*arguments, errors=errors.fileno())
        errors.seek(0)
        return [line.removeprefix("warning: ") for line in errors.read().decode().splitlines() if "warning:" in line]


def fullsize(shared: Path, work: Path) -> None:
    rows, cards = [], []
    for name in FULL:
        output = work / name
        data = ["--data-path", str(shared / "data" / "imagenet_sample"), "--split", "val", "--batch", "8"]
        base = ["--cfg", name, "--random-weights", "--opts", "MODEL.NUM_CLASSES", "128", "--policy", "ft-mode1", *data]
        for what, extra in (("calibrate, 80 pictures", []), ("and score 128 pictures, 3 precisions", [])):
            seconds, megabytes = swin_quant("calibrate", *base, *extra, "--output", str(output))
            rows.append(f"| {name} | {what} | {seconds:.1f} | {megabytes:.0f} |")
        cards.append(str(output / f"{name}_calib.json"))
    swin_quant("report", *cards, "--output", str(work / "table"))
    table = "\n".join(["| model | whole process | seconds | peak memory, MB |", "|---|---|---|---|", *rows])
    path = RESULTS / "ptq_fullsize.md"
    path.write_text(f"{(work / 'table' / 'accuracy.md').read_text()}\n{table}\n")


def swin_quant(*arguments: str, errors: int = 2) -> tuple[float, float]:
    """Run the command in a new process with its standard error in a file; returns wall seconds and peak resident
    megabytes."""
    print("swin-quant", *arguments, flush=True)
    start = time.perf_counter()
    command = [sys.executable, "-m", "swin_quant", *arguments, "--quiet"]
    pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, errors, 2)])
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"swin-quant {arguments[0]} failed")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


if __name__ == "__main__":
    main()
