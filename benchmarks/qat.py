"""QAT on real pictures, through the command line: writes docs/results/qat_cifar10.md.

    python benchmarks/qat.py --shared DIR [--work DIR] [--models NAME ...] [--bits 8,8 4,8 4,4]

For the micro Swin V1 and V2 of DIR/checkpoints on DIR/data/cifar10, at each pair of bits of weights and activations:
PTQ in both int8 modes, then QAT in mode 1 with frozen and with learned ranges, by the recipes micro_w*a*, the float
model as the teacher. A QAT run that is done already is not repeated, one that was cut off goes on.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
MICRO = ("swin_micro_cifar10", "swinv2_micro_cifar10")
INTRODUCTION = """# QAT on CIFAR-10, micro Swin V1 and V2

Top-1 in percent on the 5,000 pictures of `val`; float with its standard error. QAT starts from the PTQ checkpoint in
mode 1, by the recipes micro_w*a*, the float model as the teacher. *Won back* is (QAT - PTQ) / (float - PTQ) in mode 1,
where PTQ lost more than two standard errors. Minutes are CPU time of one core of the whole command, frozen / learned:
loading, training and scoring. Written by `python benchmarks/qat.py`.
"""
QAT = {"frozen": ["--amax", "frozen"], "learned": ["--amax", "learned"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("out/qat"))
    parser.add_argument("--models", nargs="+", default=MICRO)
    parser.add_argument("--bits", nargs="+", default=["8,8", "4,8", "4,4"])
    parser.add_argument("--output", type=Path, default=RESULTS / "qat_cifar10.md")
    args = parser.parse_args()
    rows = []
    for name in args.models:
        for weights, activations in (pair.split(",") for pair in args.bits):
            rows.append(row(args.shared, args.work, name, weights, activations))
            print(rows[-1], flush=True)
            args.output.write_text(table(rows))


def row(shared: Path, work: Path, name: str, weights: str, activations: str) -> dict:
    """Results by column: each is a pair of top-1 in percent and what it took, in minutes, if it was trained."""
    config, teacher = (shared / "checkpoints" / f"{name}.{suffix}" for suffix in ("yaml", "pth"))
    data = ["--cfg", config, "--data-path", shared / "data" / "cifar10", "--zip", "--half", "none"]
    bits = [] if (weights, activations) == ("8", "8") else ["--wprec", weights, "--aprec", activations]
    folder = work / name / f"w{weights}a{activations}"

    calibrated = folder / "ptq" / f"{name}_calib.pth"
    modes = ["--policy", "ft-mode1", "ft-mode2", *bits]
    if not calibrated.with_suffix(".json").exists():
        swin_quant("calibrate", *data, "--resume", teacher, *modes, "--calib-output-path", calibrated.parent)
    results = json.loads(calibrated.with_suffix(".json").read_text())["results"]
    found = {"float": results[0]["acc1"]}
    for result in results[1:]:
        found["PTQ mode 1" if "mode1" in result["policy"] else "PTQ mode 2"] = result["acc1"]
    standard_error = (found["float"] * (100 - found["float"]) / results[0]["pictures"]) ** 0.5

    for way, flags in QAT.items():
        card = folder / name / way / f"{name}_qat.json"
        start = ["--pretrained", calibrated, "--resume", "auto", "--policy", "ft-mode1", *bits, "--teacher", teacher]
        if not (card.exists() and json.loads(card.read_text())["results"]):
            recipe = f"micro_w{weights}a{activations}"
            before = cpu_seconds()
            swin_quant("finetune", *data, *start, "--recipe", recipe, *flags, "--output", folder, "--tag", way)
            (card.parent / "cpu_seconds.txt").write_text(f"{cpu_seconds() - before:.1f}")
        found[f"QAT {way}"] = json.loads(card.read_text())["results"][-1]["acc1"]
        found[f"minutes {way}"] = float((card.parent / "cpu_seconds.txt").read_text()) / 60
    return {"model": name, "bits": f"W{weights}A{activations}", "s.e.": standard_error, **found}


def table(rows: list[dict]) -> str:
    """Markdown. What PTQ lost is won back by a share: (QAT - PTQ) / (float - PTQ)."""
    head = ["model", "bits", "float", "PTQ mode 1", "PTQ mode 2"]
    head += ["QAT frozen", "won back", "QAT learned", "won back", "minutes"]
    lines = [INTRODUCTION, "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for found in rows:
        lost = found["float"] - found["PTQ mode 1"]
        cells = [found["model"], found["bits"], f"{found['float']:.2f} ± {found['s.e.']:.2f}"]
        cells += [f"{found[way]:.2f}" for way in ("PTQ mode 1", "PTQ mode 2")]
        for way in QAT:
            won = (found[f"QAT {way}"] - found["PTQ mode 1"]) / lost if lost > 2 * found["s.e."] else None
            cells += [f"{found[f'QAT {way}']:.2f}", "" if won is None else f"{won:.0%}"]
        cells.append(" / ".join(f"{found[f'minutes {way}']:.0f}" for way in QAT))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cpu_seconds() -> float:
    """CPU time of all commands that ran so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def swin_quant(*words: object) -> None:
    command = [sys.executable, "-m", "swin_quant", *map(str, words), "--quiet"]
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
