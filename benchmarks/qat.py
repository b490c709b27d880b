"""QAT on real pictures, through the command line: writes docs/results/qat_cifar10.md.

    python benchmarks/qat.py --shared DIR [--work DIR] [--models NAME ...] [--bits 8,8 4,8 4,4] [--score]

For the micro Swin V1 and V2 of examples/checkpoints on DIR/data/cifar10, at each pair of bits of weights and
activations: PTQ in both int8 modes, then QAT in mode 1 with frozen and with learned ranges, by the recipes micro_w*a*,
with the float model as the teacher. A finished QAT run is not repeated, an interrupted one goes on. --score only scores
the finished runs in --work again, whichever version made them.
"""

import json
import resource
from pathlib import Path
from typing import Any

from pages import EXAMPLES, RESULTS, line_of, save, script_parser, swin_quant

MICRO = ("swin_micro_cifar10", "swinv2_micro_cifar10")
INTRODUCTION = """# QAT on CIFAR-10, micro Swin V1 and V2

The trained models of [examples/checkpoints](../../examples/checkpoints). Top-1 in percent on the 5,000 pictures of
`val`, and beneath it the difference to the float checkpoint with its paired standard error, in points. Ranges are those
of the default calibrator. QAT starts from the PTQ checkpoint in mode 1, by the recipes micro_w*a*, the float model as
the teacher; *unquantized*: its weights with the nodes off. *Won back* is (QAT - PTQ) / (float - PTQ) in mode 1, where
PTQ lost more than two standard errors. Minutes are CPU time of one core of the whole command, loading and scoring
included, beside other work. Written by `python benchmarks/qat.py`.
"""
WAYS = ("frozen", "learned")
MODES = {"PTQ mode 1": "ft-mode1", "PTQ mode 2": "ft-mode2"}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("out/qat"))
    parser.add_argument("--models", nargs="+", default=MICRO)
    parser.add_argument("--bits", nargs="+", default=["8,8", "4,8", "4,4"])
    parser.add_argument("--score", action="store_true", help="train nothing: score the runs that are there")
    parser.add_argument("--output", type=Path, default=RESULTS / "qat_cifar10.md")
    args = parser.parse_args()
    rows = []
    for name in args.models:
        for weights, activations in (pair.split(",") for pair in args.bits):
            run = Run(args.shared / "data" / "cifar10", args.work, name, weights, activations)
            if args.score:
                run.score()
            else:
                run.train()
            rows.append(run.row())
            print(rows[-1], flush=True)
            save(args.output, table(rows))


class Run:
    """A model at a pair of bits: the folder of its runs, and the command lines that make and score them."""

    def __init__(self, data: Path, work: Path, name: str, weights: str, activations: str) -> None:
        self.name, self.bits = name, f"w{weights}a{activations}"
        config, self.float = (EXAMPLES / f"{name}.{end}" for end in ("yaml", "safetensors"))
        self.data = ["--cfg", config, "--data-path", data, "--zip", "--half", "none"]
        self.precision = [] if self.bits == "w8a8" else ["--wprec", weights, "--aprec", activations]
        self.folder = work / name / self.bits
        self.calibrated = self.folder / "ptq" / f"{name}_calib.pth"

    def trained(self, way: str) -> Path:
        return self.folder / self.name / way / f"{self.name}_qat.pth"

    def train(self) -> None:
        """Calibrate, fine-tune and score whatever is missing."""
        modes = ["--policy", *MODES.values(), *self.precision]
        if not scored(self.calibrated):
            swin_quant("calibrate", *self.data, "--checkpoint", self.float, *modes,
                       "--output", self.calibrated.parent)  # fmt: skip
        start = ["--checkpoint", self.calibrated, "--continue", "--policy", "ft-mode1", *self.precision]
        for way in WAYS:
            if scored(self.trained(way)):
                continue
            before = cpu_seconds()
            swin_quant("finetune", *self.data, *start, "--teacher", self.float, "--recipe", f"micro_{self.bits}",
                       "--amax", way, "--output", self.trained(way).parent)  # fmt: skip
            minutes_of(self.trained(way)).write_text(f"{cpu_seconds() - before:.1f}")

    def score(self) -> None:
        """Score existing checkpoints, those of QAT with their original."""
        modes = ["--policy", *MODES.values(), *self.precision]
        swin_quant("evaluate", *self.data, "--checkpoint", self.calibrated, *modes)
        for way in WAYS:
            swin_quant("evaluate", *self.data, "--checkpoint", self.trained(way), "--float", self.float)

    def row(self) -> dict[str, Any]:
        """Results by column, from the run cards."""
        ptq = results(self.calibrated)
        found = {"model": self.name, "bits": self.bits.upper(), "float": ptq[None, None, "float32"], "minutes": []}
        for title, mode in MODES.items():
            found[title] = next(result for (_, policy, _), result in ptq.items() if policy and policy.startswith(mode))
        for way in WAYS:
            qat = results(self.trained(way))
            found[f"QAT {way}"] = next(
                result for (whose, policy, _), result in qat.items() if whose == "qat" and policy
            )
            found[f"{way}, unquantized"] = qat["qat", None, "float32"]
            minutes = minutes_of(self.trained(way))
            found["minutes"].append(f"{float(minutes.read_text()) / 60:.0f}" if minutes.exists() else "-")
        return found


def results(checkpoint: Path) -> dict[tuple[str | None, str | None, str], dict[str, Any]]:
    """The results in the card of a checkpoint, by weights, policy and precision."""
    card = json.loads(checkpoint.with_suffix(".json").read_text())
    return {(result.get("weights"), result["policy"], result["precision"]): result for result in card["results"]}


def scored(checkpoint: Path) -> bool:
    return checkpoint.with_suffix(".json").exists() and bool(results(checkpoint))


def minutes_of(checkpoint: Path) -> Path:
    return checkpoint.with_name("cpu_seconds.txt")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown. QAT recovers this share of PTQ's loss: (QAT - PTQ) / (float - PTQ)."""
    figures = [*MODES]
    for way in WAYS:
        figures += [f"QAT {way}", f"{way}, unquantized"]
    head = ["model", "bits", "float", *figures, *(f"won back, {way}" for way in WAYS), f"minutes, {' / '.join(WAYS)}"]
    lines = [INTRODUCTION, line_of(head), "|" + "---|" * len(head)]
    for found in rows:
        ptq = found["PTQ mode 1"]
        lost = -ptq["delta_acc1"] if -ptq["delta_acc1"] > 2 * ptq["delta_acc1_se"] else None
        won = [f"{1 + found[f'QAT {way}']['delta_acc1'] / lost:.0%}" if lost else "" for way in WAYS]
        cells = [found["model"], found["bits"], f"{found['float']['acc1']:.2f}"]
        cells += [*(figure(found[title]) for title in figures), *won, " / ".join(found["minutes"])]
        lines.append(line_of(cells))
    return "\n".join(lines) + "\n"


def figure(result: dict[str, Any]) -> str:
    return f"{result['acc1']:.2f}<br>{result['delta_acc1']:+.2f} ± {result['delta_acc1_se']:.2f}"


def cpu_seconds() -> float:
    """CPU time of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
