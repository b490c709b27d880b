"""A family of checkpoints in one command: writes docs/results/family.md.

    python benchmarks/family.py --data-path DIR [--reference DIR] [--passes best] [--pictures 80] [--work W]

DIR is CIFAR-10 as zip files and maps. The family is examples/checkpoints, with --reference also the Swin V1 and V2 of
that folder, whose names get `reference` instead of `cifar10`. A user with ImageNet runs the same for Swin-T to L:
`swin-quant quantize CHECKPOINT ... --data-path imagenet --for openvino --passes best --output W`. If interrupted, it
goes on where it stopped when it is run again. This runs it twice: the second time must find every step done.
"""

import subprocess
import sys
from pathlib import Path

from pages import RESULTS, ROOT, save, script_parser

PAGE = RESULTS / "family.md"
FAMILY = ("swin_micro_cifar10", "swinv2_micro_cifar10", "resnet_micro_cifar10")
REFERENCES = ("swin_micro_cifar10", "swinv2_micro_cifar10")


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--passes", default="best")
    parser.add_argument("--pictures", type=int, default=80)
    parser.add_argument("--work", type=Path, default=Path("out/family"))
    args = parser.parse_args()
    family = [Path("examples", "checkpoints", f"{name}.safetensors") for name in FAMILY]
    if args.reference:
        family += [renamed(args.reference / name, args.work) for name in REFERENCES]
    words = ["--for", "openvino", "--passes", args.passes, "--pictures", args.pictures, "--half", "none"]
    command = ["quantize", *family, "--data-path", args.data_path, "--zip", *words, "--output", args.work]
    swin_quant(*command)
    told = swin_quant(*command)
    steps = [line for line in told.splitlines() if " swin-quant " in line]
    if undone := [line for line in steps if not line.endswith(": done before")]:
        raise SystemExit("\n".join(["the second time, this was done again:", *undone]))
    swin_quant("report", *(args.work / file.stem for file in family), "--output", args.work)
    page = [
        "# A family in one command",
        "",
        f"`swin-quant quantize {' '.join(file.name for file in family)} --data-path cifar10 --zip "
        f"{' '.join(map(str, words))} --output family`: {args.pictures} training pictures calibrate, all of `val` "
        f"score on OpenVINO. Given again, each of its {len(steps)} steps was found done before. Written by",
        "`python benchmarks/family.py`; latencies beside other work.",
        "",
        (args.work / "accuracy.md").read_text(),
    ]
    save(PAGE, "\n".join(page))


def renamed(source: Path, work: Path) -> Path:
    """A checkpoint with its run card under another name, so that its folder differs from the example's."""
    name = source.name.replace("cifar10", "reference")
    made = work / "checkpoints" / f"{name}.safetensors"
    if not made.exists():
        cfg = ("--cfg", source.with_suffix(".yaml"), "--opts", "MODEL.NAME", name)
        swin_quant("convert", source.with_suffix(".pth"), *cfg, "--to", made)
    return made


def swin_quant(*words: object) -> str:
    """Run a command and return its output."""
    done = subprocess.run([sys.executable, "-m", "swin_quant", *map(str, words)], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    print(done.stdout, flush=True)
    if done.returncode:
        raise SystemExit(f"{words[0]} ended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
