"""Products with a channel far from the others, in FasterTransformer's modes: writes docs/results/hard_products.md.

    python benchmarks/hard_products.py --data-path DIR [--work W] [--mlp 0.1] [--merging 5 10]

DIR is CIFAR-10 as zip files and maps. In the micro Swin V1 of examples/checkpoints such channels are planted by
tests/heavy_products.py, in fc2 of every MLP (--mlp: by these shares of its hidden units) or in every patch merging
(--merging: this many times the largest product). fc2's inputs and weights do not grow, but its product does, on one
channel, and mode 1 writes it in int8 with one range. Each model goes through `swin-quant quantize --for
fastertransformer` in modes 1 and 2, and is scored on the emulator.
"""

import argparse
import sys
import textwrap
from pathlib import Path

from hard import quantized
from pages import EXAMPLES, RESULTS, ROOT, save, script_parser

sys.path.insert(0, str(ROOT))
PAGE = RESULTS / "hard_products.md"
NAME = "swin_micro_cifar10"
CONFIG = EXAMPLES / f"{NAME}.yaml"
PICTURES = 128  # to find the least important units, and the size of products

HEAD = """
{name} (V1), with such a channel planted (tests/heavy_products.py). *fc2*: a share of the hidden units of every MLP,
those that matter least, is constant and feeds the first channel by its largest weight; fc2's bias takes that off
again. *patch merging*: the channel of each of its products that varies least is constant, so many times the largest
product; the norm behind it is fitted to that, and the projection of the next block takes it off the residual stream.
The float model is the changed one. Mode 1 of FasterTransformer writes these products in int8, each with one range. 80
training pictures calibrate, all 5,000 of `val` score, on the emulator of FasterTransformer's kernels, whose latency
means nothing. Mode 2 turns off the int8 products of fc2 and of patch merging. Written by
`python benchmarks/hard_products.py`.
"""


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("out/hard_products"))
    parser.add_argument("--mlp", type=float, nargs="*", default=[0.1])
    parser.add_argument("--merging", type=float, nargs="*", default=[5.0, 10.0])
    args = parser.parse_args()
    rows = []
    for title, place, much in cases(args):
        checkpoint = planted(place, much, args.data_path, args.work)
        for way in ("ft-mode1", "ft-mode2"):
            folder, words = checkpoint.parent / way, ["--for", "fastertransformer", "--policy", way]
            card = quantized(checkpoint, CONFIG, args.data_path, folder, words, f"{NAME}_int8_*.json")
            rows += rows_of(title, way, card)
    write(rows)


def cases(args: argparse.Namespace) -> list[tuple[str, str, float]]:
    """Title, place and amount of each case."""
    return [
        ("nothing", "", 0.0),
        *((f"fc2, {share:.0%} of the hidden units", "mlp", share) for share in args.mlp),
        *((f"patch merging, {times:g} times", "merging", times) for times in args.merging),
    ]


def planted(place: str, much: float, data: Path, work: Path) -> Path:
    """The checkpoint file with `much` planted in that place."""
    import torch

    import swin_quant as sq
    from swin_quant.data.loader import load_batches
    from tests.heavy_products import plant_in_merging, plant_in_mlp

    file = work / f"{place}{much:g}" / f"{NAME}.pth"
    if file.exists():
        return file
    model = sq.load(CONFIG.with_suffix(".safetensors"), CONFIG)
    pictures = sq.pictures(data, "train", PICTURES)
    opened = pictures.open()
    (batch,) = load_batches(opened, model.preprocess, [pictures.indices(opened)], 0)
    stages = model.module.layers

    def product(layer: torch.nn.Module, given: bool) -> torch.Tensor:
        """A layer's inputs or outputs, one token a row."""
        seen: list[torch.Tensor] = []
        hook = layer.register_forward_hook(lambda _, x, y: seen.append(x[0] if given else y))
        with torch.no_grad():
            model.module(batch.images)
        hook.remove()
        return seen[0].flatten(0, -2)

    for mlp in [block.mlp for stage in stages for block in stage.blocks] if place == "mlp" else []:
        plant_in_mlp(mlp, product(mlp.fc2, given=True), much)
    for stage, behind in zip(stages[:-1], stages[1:], strict=True) if place == "merging" else []:
        reduction = stage.downsample.reduction
        plant_in_merging(stage.downsample, behind.blocks[0], product(reduction, given=False), much)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {k: v for k, v in model.module.state_dict().items() if not k.endswith("_amax")}}, file)
    return file


def rows_of(title: str, way: str, card: dict) -> list[str]:
    """One row for the float model, one for the artifact."""
    base, last = card["results"][0], card["results"][-1]
    rows = [f"| {title} | float32 | {base['acc1']:.2f} | | | |"] if way == "ft-mode1" else []
    rows.append(
        f"| {title} | {way} | {last['acc1']:.2f} | {last['delta_acc1']:+.2f} ± {last['delta_acc1_se']:.2f} | "
        f"{last['agreement']:.1f} | {last['sqnr_db']:.1f} |"
    )
    print(rows[-1], flush=True)
    return rows


def write(rows: list[str]) -> None:
    page = [
        "# Products with a channel far from the others",
        "",
        *textwrap.wrap(HEAD.format(name=NAME), 118),
        "",
        "| planted | policy | acc@1 | Δ acc@1 | agree % | SQNR dB |",
        "|---|---|---:|---:|---:|---:|",
        *rows,
    ]
    save(PAGE, "\n".join(page) + "\n")


if __name__ == "__main__":
    main()
