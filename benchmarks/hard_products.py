"""Products with a channel far from the others, in FasterTransformer's modes: writes docs/results/hard_products.md.

    python benchmarks/hard_products.py --data-path DIR [--work W] [--share 0 0.03 0.1] [--max-drop 0.3]

DIR is CIFAR-10 as zip files and maps. In the micro Swin V1 of examples/checkpoints the hidden units of every MLP that
matter least are made constant, a share of them, as large as any hidden value, and feed the first channel of fc2 by its
largest weight; its bias takes that off again. Nothing but those units is lost in float, and no input or weight becomes
larger, but fc2's product does, on one channel: mode 1 writes it in int8 with one range. (Nothing behind patch merging's
reduction could take such a thing off: it has no bias, and the norm behind the residual stream compares channels.) Each
model goes through `swin-quant quantize --for fastertransformer` in mode 1 and with `--policy auto`, and is scored on
the emulator.
"""

import argparse
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "hard_products.md"
NAME = "swin_micro_cifar10"
CONFIG = ROOT / "examples" / "checkpoints" / f"{NAME}.yaml"
PICTURES = 128  # that tell which hidden units matter, and how large they become


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("out/hard_products"))
    parser.add_argument("--share", type=float, nargs="+", default=[0, 0.03, 0.1])
    parser.add_argument("--max-drop", type=float, default=0.3)
    args = parser.parse_args()
    rows, found = [], []
    for share in args.share:
        checkpoint = planted(share, args.data_path, args.work)
        ways = {"ft-mode1": ["ft-mode1"], "auto": ["auto", "--max-drop", str(args.max_drop)]}
        for way, words in ways.items():
            folder = checkpoint.parent / way
            if way == "auto" and not folder.exists():  # calibrated alike: `quantize` finds that step done
                folder.mkdir()
                for file in (checkpoint.parent / "ft-mode1").glob(f"{NAME}_calib.*"):
                    shutil.copy(file, folder)
            rows += rows_of(share, way, quantized(checkpoint, args.data_path, folder, words))
        found.append(found_of(share, json.loads((folder / f"{NAME}_calib.json").read_text())))
    write(rows, found, args)


def planted(share: float, data: Path, work: Path) -> Path:
    """The checkpoint in a file, `share` of the hidden units constant."""
    import torch

    import swin_quant as sq
    from swin_quant.data.loader import load_batches
    from swin_quant.models.layers import Mlp

    file = work / f"{share:g}" / f"{NAME}.pth"
    if file.exists():
        return file
    model = sq.load(CONFIG.with_suffix(".safetensors"), CONFIG)
    pictures = sq.pictures(data, "train", PICTURES)
    opened = pictures.open()
    (batch,) = load_batches(opened, model.preprocess, [pictures.indices(opened)], 0)
    mlps = [module for module in model.module.modules() if isinstance(module, Mlp)]
    hidden: dict[Mlp, torch.Tensor] = {}
    for mlp in mlps:
        mlp.fc2.register_forward_pre_hook(lambda _, given, mlp=mlp: hidden.update({mlp: given[0].flatten(0, -2)}))
    with torch.no_grad():
        model.module(batch.images)
        for mlp in mlps if share else []:
            plant(mlp, hidden[mlp], share)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {k: v for k, v in model.module.state_dict().items() if not k.endswith("_amax")}}, file)
    return file


def plant(mlp, hidden, share: float) -> None:
    """`hidden` [tokens, units]: what fc2 of the MLP is given."""
    from torch.nn.functional import gelu

    fc1, fc2 = mlp.fc1, mlp.fc2
    matters = hidden.std(0) * fc2.weight.norm(dim=0)
    at = matters.argsort()[: max(1, round(share * len(matters)))]
    fc2.bias += fc2.weight[:, at] @ hidden.mean(0)[at]
    fc1.weight[at], fc2.weight[:, at] = 0.0, 0.0
    fc1.bias[at] = hidden.abs().max()
    fc2.weight[0, at] = fc2.weight.abs().max()
    fc2.bias[0] -= fc2.weight[0, at] @ gelu(fc1.bias[at])


def quantized(checkpoint: Path, data: Path, folder: Path, words: list[str]) -> dict:
    """The card of the artifact that `swin-quant quantize` made, with its results."""
    command = [
        sys.executable,
        "-m",
        "swin_quant",
        "quantize",
        checkpoint,
        "--cfg",
        CONFIG,
        "--data-path",
        data,
        "--zip",
    ]
    command += ["--for", "fastertransformer", "--output", folder, "--half", "none", "--policy", *words]
    done = subprocess.run(list(map(str, command)), cwd=ROOT)
    cards = [json.loads(file.read_text()) for file in sorted(folder.glob(f"{NAME}_int8_*.json"))]
    made = [card for card in cards if card.get("artifact")]
    if done.returncode or not made:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}")
    return made[-1]


def rows_of(share: float, way: str, card: dict) -> list[str]:
    """The float model once, and the artifact."""
    base, last = card["results"][0], card["results"][-1]
    rows = [f"| {share:.0%} | float32 | {base['acc1']:.2f} | | | |"] if way == "ft-mode1" else []
    rows.append(
        f"| {share:.0%} | {way} | {last['acc1']:.2f} | {last['delta_acc1']:+.2f} ± {last['delta_acc1_se']:.2f} | "
        f"{last['agreement']:.1f} | {last['sqnr_db']:.1f} |"
    )
    print(rows[-1], flush=True)
    return rows


def found_of(share: float, calibrated: dict) -> str:
    """What the search measured of the modes, and which it took."""
    record = calibrated["searches"][-1]
    modes = [one for one in record["tried"] if one["policy"] != "float"]
    said = [
        f"{one['policy']} ({one['nodes']} nodes on) {one['loss']['sqnr_db']:.1f} dB, expected drop "
        f"{one['loss']['drop']:.2f} ± {one['loss']['drop_error']:.2f} points{', taken' if one['found'] else ''}"
        for one in modes
    ]
    return f"* **{share:.0%}**: {'; '.join(said)}."


def write(rows: list[str], found: list[str], args: argparse.Namespace) -> None:
    page = [
        "# Products with a channel far from the others",
        "",
        *textwrap.wrap(
            f"{NAME} (V1), of which a share of the hidden units of every MLP, those that matter least, is constant "
            "and feeds the first channel of fc2 by its largest weight; fc2's bias takes that off again. Float loses "
            "those units and no more, inputs and weights are no larger; fc2's product is, on one channel, and mode 1 "
            "of FasterTransformer writes it in int8 with one range. The float model is the changed one; 80 training "
            "pictures calibrate, all 5,000 of `val` score, on the emulator of FasterTransformer's kernels, whose "
            f"latency means nothing. *auto*: `quantize --for fastertransformer --policy auto --max-drop "
            f"{args.max_drop:g}`, without labels. The kernels run mode 1 and mode 2 only, and it takes the one that "
            "leaves the fewest nodes float within the budget. Mode 2 turns off the int8 products of fc2 and of patch "
            "merging. Patch merging's own are as they were: it has no bias that could take such a channel off again. "
            "Written by `python benchmarks/hard_products.py`.",
            118,
        ),
        "",
        "| constant units | policy | acc@1 | Δ acc@1 | agree % | SQNR dB |",
        "|---:|---|---:|---:|---:|---:|",
        *rows,
        "",
        "What the search measured, on 1,024 training pictures in fake-quant; the drop counts twice there:",
        "",
        *found,
    ]
    PAGE.write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
