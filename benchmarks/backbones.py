"""Backbones beside timm's `features_only`: equality and latency; writes docs/results/backbones.md.

    python benchmarks/backbones.py equality [--models NAME ...] [--sizes HxW ...]
    python benchmarks/backbones.py files    [--models NAME ...] [--sizes HxW ...]   (exports and runs them: minutes)
    python benchmarks/backbones.py latency  [--models NAME ...] [--sizes HxW ...]   (a quiet machine)

Random weights at full size, seeded pictures. Each command replaces its section of the page; latency runs the files that
`files` left in --work, and makes missing ones.
"""

import argparse
from functools import partial
from pathlib import Path
from statistics import median

import torch
from pages import RESULTS, cpu, in_turns, place, script_parser

import swin_quant as sq
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.compat import import_timm
from swin_quant.score.difference import difference_of_outputs

PAGE = RESULTS / "backbones.md"
MODELS = {
    "swin_tiny_patch4_window7_224": "swin_tiny_patch4_window7_224",
    "swinv2_tiny_patch4_window8_256": "swinv2_tiny_window8_256",
}
SIZES = ("224x224", "256x320", "200x332")
ENGINES = ("onnxruntime", "openvino")
KINDS = {"float32": "fp32", "int8": "int8"}  # names of files
HEADING = (
    "# Backbones\n\nRandom weights at full size, seeded pictures: `python benchmarks/backbones.py equality`, `files` "
    f"and `latency`. torch {torch.__version__}.\n"
)
SECTIONS = {
    "equality": (
        "Equality with timm",
        "Mean and largest difference of the four maps from those of timm's `features_only` (`strict_img_size=False`), "
        "the same random weights, in units of the mean magnitude. Sizes that the patch does not divide are padded by "
        "hand for timm, which refuses them.",
    ),
    "files": (
        "Files of any size",
        "One ONNX file each, batch, height and width open, beside the model in torch (int8: policy cpu, beside fake "
        "quantization): mean difference in units of the mean magnitude, SQNR, cosine.",
    ),
    "latency": (
        f"Latency on {cpu()}",
        "Batch 1, median milliseconds, interleaved, 2 threads. timm and torch: eager float32; files are of any size.",
    ),
}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("what", choices=tuple(SECTIONS))
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--work", type=Path, default=Path("out/backbones"))
    args = parser.parse_args()
    torch.manual_seed(0)
    args.work.mkdir(parents=True, exist_ok=True)
    rows = [row for name in args.models for row in MEASURES[args.what](name, args)]
    title, text = SECTIONS[args.what]
    place(PAGE, HEADING, title, f"{text}\n\n{table(rows)}")


def table(rows: list[dict[str, str]]) -> str:
    lines = [list(rows[0]), ["---" for _ in rows[0]], *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def pair(name: str, work: Path) -> tuple[sq.Model, torch.nn.Module]:
    """Our backbone and timm's, with the same random weights."""
    theirs = import_timm().create_model(MODELS[name], features_only=True, strict_img_size=False).eval()
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "norm" in key:  # V2's last norm of a branch may be zero, and remove the branch
                parameter.add_(0.1 * torch.randn_like(parameter) + ("weight" in key and not parameter.any()))
    file = work / f"{name}.pth"
    torch.save(theirs.state_dict(), file)
    return sq.load(file, name, output_kind="features"), theirs


def pictures(size: str, count: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, *map(int, size.split("x")), generator=torch.Generator().manual_seed(1))


def padded(images: torch.Tensor, patch: int = 4) -> torch.Tensor:
    return torch.nn.functional.pad(images, (0, -images.shape[3] % patch, 0, -images.shape[2] % patch))


def equality(name: str, args: argparse.Namespace) -> list[dict[str, str]]:
    model, theirs = pair(name, args.work)
    rows = []
    for size in args.sizes:
        images = pictures(size)
        with torch.inference_mode():
            expected = [x.permute(0, 3, 1, 2) for x in theirs(padded(images))]
            far = difference_of_outputs([model.module(images)], [expected])
        maps = ", ".join("x".join(map(str, x.shape[1:])) for x in expected)
        rows.append({"model": name, "picture": size, "maps": maps, "mean": f"{far['mean']:.1e}",
                     "largest": f"{far['max']:.1e}"})  # fmt: skip
    return rows


def exported(model: sq.Model, work: Path) -> dict[str, sq.Exported]:
    """The float file and the int8 file; the model is calibrated afterwards."""
    found = {"float32": sq.export(model, "openvino", work / model.name, precision="float")}
    sq.calibrate(model, [pictures(size) for size in SIZES], "cpu", method="max")
    return found | {"int8": sq.export(model, "openvino", work / model.name)}


def left_over(folder: Path) -> dict[str, sq.Exported]:
    """The files that an earlier `exported` wrote; nothing if one is missing."""
    found = {kind: sorted(folder.glob(f"*_{word}_openvino.onnx")) for kind, word in KINDS.items()}
    return {kind: sq.Exported(open_artifact(files[0])) for kind, files in found.items() if all(found.values())}


def files(name: str, args: argparse.Namespace) -> list[dict[str, str]]:
    model, _ = pair(name, args.work)
    rows = []
    for kind, artifact in exported(model, args.work).items():
        for engine in ENGINES:
            run = artifact.load(engine)
            for size in args.sizes:
                images = pictures(size)
                with torch.inference_mode():
                    expected = model(images) if kind == "int8" else model.module(images)
                far = difference_of_outputs([run(images)], [expected])
                where = {"model": name, "file": kind, "engine": engine, "picture": size}
                sqnr, cosine = f"{far['sqnr_db']:.1f}", f"{far['cosine']:.6f}"
                rows.append(where | {"mean": f"{far['mean']:.1e}", "SQNR dB": sqnr, "cosine": cosine})
    return rows


def latency(name: str, args: argparse.Namespace) -> list[dict[str, str]]:
    model, theirs = pair(name, args.work)
    runs = {"timm": theirs, "torch": model.module}
    for kind, artifact in (left_over(args.work / name) or exported(model, args.work)).items():
        runs |= {f"{engine} {kind}": artifact.load(engine, threads=2) for engine in ENGINES}
    torch.set_num_threads(2)
    rows = []
    for size in args.sizes:
        images = padded(pictures(size))
        with torch.inference_mode():
            taken = in_turns({key: partial(run, images) for key, run in runs.items()}, args.rounds + 2)
        ms = {key: f"{1000 * median(seconds[2:]):.0f}" for key, seconds in taken.items()}
        rows.append({"model": name, "picture": size, **ms})
    return rows


MEASURES = {"equality": equality, "files": files, "latency": latency}

if __name__ == "__main__":
    main()
