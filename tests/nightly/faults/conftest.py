"""Attacked commands: their input, their results, and a table of the tried faults.

FAULT_CASES=N tries N random faults of ranks instead of the few of every test run, under real launchers and with the
patience that users have; FAULT_TABLE=FILE writes the outcome (`make faults` does both).
"""

import hashlib
import json
import multiprocessing
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from swin_quant.base.compat import import_timm
from swin_quant.cli import main
from swin_quant.score.scoring import score_engines  # noqa: F401
from swin_quant.train.outdir import read_table

NAME = "swin_micro"
CHANGING = ("images_per_second", "seconds", "ms_per_picture", "created", "versions")


@dataclass(frozen=True)
class Commands:
    """words(command, out): a run of `command` that writes into `out`; results(command, out): its results there."""

    common: list
    float_file: Path
    calibrated: Path
    recipe: Path

    def words(self, command, out):
        half = "--half", "none"
        own = {
            "calibrate": ["--checkpoint", self.float_file, "--pictures", 8, "--batch", 2, "--policy", "ft-mode1"],
            "evaluate": ["--checkpoint", self.float_file, "--batch", 2, *half],
            "train": ["--recipe", self.recipe, *half],
            "finetune": ["--recipe", self.recipe, "--checkpoint", self.calibrated, *half],
        }
        return [str(word) for word in (command, *self.common, *own[command], "--output", out)]

    def again(self, command, out):
        return self.words(command, out) + (["--continue"] if command in ("train", "finetune") else [])

    def results(self, command, out):
        """All results that another run of the same kind must repeat to the bit: {name: value}, {} if there are none."""
        found = {}
        for file in sorted(Path(out).rglob("*")):
            if file.suffix == ".pth":
                found[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
            elif file.suffix == ".csv":
                for number, row in enumerate(read_table(file)):
                    found[f"{file.name} row {number}"] = _lasting(row)
            elif file.suffix == ".json":
                card = json.loads(file.read_text())
                found |= {f"{file.name} {key}": _lasting(card.get(key)) for key in ("results", "calibration", "policy")}
        return found


def _lasting(value):
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in value.items() if key not in CHANGING}
    return [_lasting(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="session")
def commands(micro, pictures, tmp_path_factory):
    """The four commands that several ranks share, on the micro model; a snapshot after every step of training."""
    import_timm()  # here, once: forks inherit it
    folder = tmp_path_factory.mktemp("attacked")
    recipe = folder / "recipe.yaml"
    recipe.write_text("epochs: 2\nbatch_size: 2\nsave_minutes: 1.0e-9\naugment: {crop: padded}\n")
    common = ["--cfg", micro / "swin.yaml", "--data-path", pictures, "--device", "cpu", "--quiet"]
    made = Commands(common, micro / "swin.pth", folder / "calibrated" / f"{NAME}_calib.pth", recipe)
    words = [*made.words("calibrate", folder / "calibrated")]
    process = multiprocessing.get_context("fork").Process(target=main, args=(words,))
    process.start()
    process.join(120)
    assert made.calibrated.exists()
    return made


@pytest.fixture(scope="session")
def cases():
    """The number of random faults of ranks to try; 0 in a usual test run."""
    return int(os.environ.get("FAULT_CASES", 0))


@dataclass
class Row:
    """The outcome of one kind of fault: the number of cases, the longest end, the most lines of a rank, the losses."""

    cases: int = 0
    seconds: float | None = None
    lines: int | None = None
    lost: int = 0


ROWS: dict[str, Row] = defaultdict(Row)


@pytest.fixture(scope="session")
def tried():
    """tried(fault, lost, seconds, lines): note one case. `seconds`: until the other ranks ended; `lines`: of a rank."""

    def note(fault, lost, seconds=None, lines=None):
        row = ROWS[fault]
        row.cases, row.lost = row.cases + 1, row.lost + lost
        if seconds is not None:
            row.seconds, row.lines = max(row.seconds or 0, seconds), max(row.lines or 0, lines)

    return note


def pytest_sessionfinish():
    if file := os.environ.get("FAULT_TABLE"):
        shown = [
            f"| {fault} | {row.cases} | {'' if row.seconds is None else f'{row.seconds:.0f} s'} | "
            f"{'' if row.lines is None else row.lines} | {row.lost} |\n"
            for fault, row in sorted(ROWS.items())
        ]
        sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
        from pages import save

        save(Path(file), HEAD + "".join(shown))


HEAD = """# Faults

Written by `make faults`: real processes, faults at random (seeded) moments of a run, start-up and end included. After
every fault the command is given again (training with `--continue`) and must leave, to the bit, what an undisturbed
run leaves: checkpoint, metrics, every row of the logs once. A file that differs counts as lost.

| fault | cases | the others ended within | lines of a rank, at most | lost |
|---|---|---|---|---|
"""
