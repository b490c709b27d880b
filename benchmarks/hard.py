"""`--policy auto` on models that no rescaling cures: writes docs/results/hard.md.

    python benchmarks/hard.py --data-path DIR [--work W] [--scale 30 100] [--max-drop 0.3] [--note TEXT]

DIR is CIFAR-10 as zip files and maps. In the micro Swin V1 and V2 of examples/checkpoints, 3 % of the hidden units of
every MLP become s times as large before GELU, and the weights that read them s times smaller. GELU(s x) / s is not
GELU(x), so the float network changes a little and is scored again; and no factor can move across GELU, so no pass evens
these channels out. Each model goes through `swin-quant quantize` for OpenVINO twice: with the backend's policy, and
with `--policy auto`. An interrupted run goes on where it stopped. Latencies need a quiet machine: `--note` says on the
page what else ran.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pages import EXAMPLES, RESULTS, ROOT, float_model, save, script_parser

PAGE = RESULTS / "hard.md"
MODELS = ("swin_micro_cifar10", "swinv2_micro_cifar10")
SHARE = 0.03


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("out/hard"))
    parser.add_argument("--scale", type=int, nargs="+", default=[30, 100])
    parser.add_argument("--max-drop", type=float, default=0.3)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--note", default="Nothing else ran on the machine.")
    args = parser.parse_args()
    rows, found = [], []
    for name in args.model:
        for scale in args.scale:
            checkpoint, config = planted(name, scale, args.work)
            ways = {"cpu": [], "auto": ["--policy", "auto", "--max-drop", str(args.max_drop)]}
            for way, words in ways.items():
                folder = checkpoint.parent / way
                if way == "auto":
                    take_calibration(checkpoint.parent / "cpu", folder)
                words = ["--for", "openvino", "--batch", 8, *words]
                card = quantized(checkpoint, config, args.data_path, folder, words, "*_openvino.json")
                rows += rows_of(name, scale, way, card)
                if way == "auto":
                    found += floats_of(name, scale, json.loads((folder / f"{name}_calib.json").read_text()))
    write(rows, found, args)


def planted(name: str, scale: int, work: Path) -> tuple[Path, Path]:
    """The checkpoint with hidden units `scale` times as large, and its config, as files."""
    import torch

    from swin_quant.models.layers import Mlp

    config = EXAMPLES / f"{name}.yaml"
    file = work / f"{name}_{scale}" / f"{name}.pth"
    if file.exists():
        return file, config
    _, model = float_model(config, config.with_suffix(".safetensors"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for mlp in model.modules():
            if isinstance(mlp, Mlp):
                hidden = mlp.fc1.out_features
                at = torch.randperm(hidden, generator=generator)[: max(1, round(SHARE * hidden))]
                mlp.fc1.weight[at] *= scale
                mlp.fc1.bias[at] *= scale
                mlp.fc2.weight[:, at] /= scale
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {k: v for k, v in model.state_dict().items() if not k.endswith("_amax")}}, file)
    return file, config


def take_calibration(made: Path, folder: Path) -> None:
    """Begin a new folder with an earlier calibration: `quantize` finds that step done."""
    if not folder.exists():
        folder.mkdir()
        for file in made.glob("*_calib.*"):
            shutil.copy(file, folder)


def quantized(checkpoint: Path, config: Path, data: Path, folder: Path, words: Sequence[object], cards: str) -> dict:
    """The card of the artifact from `swin-quant quantize`, with its results; `cards`: a pattern of their names."""
    command = [sys.executable, "-m", "swin_quant", "quantize", checkpoint, "--cfg", config, "--data-path", data]
    command += ["--zip", "--output", folder, "--half", "none", *words]
    done = subprocess.run(list(map(str, command)), cwd=ROOT)
    found = [json.loads(file.read_text()) for file in sorted(folder.glob(cards))]
    made = [card for card in found if card.get("artifact")]
    if done.returncode or not made:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}")
    return made[-1]


def rows_of(name: str, scale: int, way: str, card: dict) -> list[str]:
    """One row for the float model, one for the artifact."""
    base, last = card["results"][0], card["results"][-1]
    rows = []
    if way == "cpu":
        rows.append(f"| {name} | {scale} | float32 | {base['acc1']:.2f} | | | {base['ms_per_picture']:.2f} |")
    rows.append(
        f"| {name} | {scale} | {way} | {last['acc1']:.2f} | {last['delta_acc1']:+.2f} ± {last['delta_acc1_se']:.2f} | "
        f"{last['agreement']:.1f} | {last['ms_per_picture']:.2f} |"
    )
    print(rows[-1], flush=True)
    return rows


def floats_of(name: str, scale: int, calibrated: dict) -> list[str]:
    """The layers that the search left float, and their cost."""
    record = calibrated["searches"][-1]
    whole = next(one for one in record["tried"] if one["policy"] == "cpu")
    here = next(one for one in record["tried"] if one["found"])
    layers = [
        f"{layer['layer']} ({layer['sqnr_db']:.0f} dB, {layer['saved_ms']:+.3f} ms)" for layer in record["left_float"]
    ]
    return [
        f"* **{name}, s = {scale}**: {len(layers)} layers: a batch of {record['batch']} takes {here['ms']:.3f} ms, "
        f"{record['cost_ms']:+.3f} ms beside all in int8; SQNR {whole['loss']['sqnr_db']:.1f} -> "
        f"{here['loss']['sqnr_db']:.1f} dB. {', '.join(layers) or 'Nothing had to stay float'}."
    ]


def write(rows: list[str], found: list[str], args: argparse.Namespace) -> None:
    page = [
        "# Models that no rescaling cures",
        "",
        f"{SHARE:.0%} of the hidden units of every MLP times s in front of GELU, their columns of fc2 divided by s:",
        "GELU is not linear, so no factor can be moved across it. The changed float model is the reference; 80",
        "training pictures calibrate, all 5,000 of `val` score, on OpenVINO. *cpu*: the policy of the backend; *auto*:",
        f"`--policy auto --max-drop {args.max_drop:g}`, without labels. Written by `python benchmarks/hard.py`.",
        args.note,
        "",
        "| model | s | policy | acc@1 | Δ acc@1 | agree % | ms a picture |",
        "|---|---:|---|---:|---:|---:|---:|",
        *rows,
        "",
        "Layers that `auto` left float, those with the most noise for their time first: SQNR of the logits with only",
        "that layer in int8, and the time that int8 saves there, measured for its kind of layer.",
        "",
        *found,
    ]
    save(PAGE, "\n".join(page) + "\n")


if __name__ == "__main__":
    main()
