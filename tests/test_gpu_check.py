"""scripts/gpu_check.sh before its first step: what it refuses, deletes and finds missing; and what its steps are."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from shown import PARSERS

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check.sh"


def check(folder, *flags, **environment):
    return subprocess.run(
        [SCRIPT, *flags], cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def bare(tmp_path):
    """An interpreter without any package, found from where the script is called."""
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin" / "python"
    file.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    file.chmod(0o755)
    return {"PYTHON": "bin/python", "OUT": "found"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--device", "tpu"), "--device tpu: it is cuda or cpu"),
        (("--seconds", "nine"), "--seconds nine: 10 or more"),
        (("--seconds", "0"), "--seconds 0: 10 or more"),
        (("--fast",), "[--device cuda|cpu] [--seconds N]"),
    ],
)
def test_flags_that_it_does_not_know_are_refused(tmp_path, flags, said):
    result = check(tmp_path, *flags, OUT="found")
    assert result.returncode == 2 and said in result.stdout + result.stderr
    assert not (tmp_path / "found").exists()


def test_missing_packages_end_it_and_are_named(tmp_path, bare):
    result = check(tmp_path, **bare)
    assert result.returncode == 1 and "environment ... failed: exit code 2" in result.stdout and not result.stderr
    summary = (tmp_path / "found" / "summary.md").read_text()
    assert summary.startswith("# GPU check: 1 of 1 steps failed") and "missing: torch, timm, yacs" in summary
    assert "missing: torch, timm, yacs" in result.stdout


def test_no_such_interpreter_ends_it_too(tmp_path):
    result = check(tmp_path, PYTHON="bin/none", OUT="found")
    assert result.returncode == 1 and "kernels" not in result.stdout
    assert "bin/none" in (tmp_path / "found" / "summary.md").read_text()


def test_only_files_of_the_run_before_are_deleted(tmp_path, bare):
    out = tmp_path / "found"
    out.mkdir()
    for name in ("README.md", "mine.log", "kernels.log", "memory.md"):
        (out / name).write_text("before")
    (out / "steps.tsv").write_text("kernels\t3\tpassed\n")
    check(tmp_path, **bare)
    assert {file.name for file in out.iterdir()} == {
        "README.md",
        "mine.log",
        "environment.log",
        "steps.tsv",
        "summary.md",
    }


@pytest.fixture
def noting(tmp_path):
    """An interpreter that does nothing, and notes the words that it was given."""
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin" / "python"
    file.write_text('#!/bin/sh\n{ printf \'%s\\037\' "$@"; echo; } >> "$NOTES"\necho 1 passed\n')
    file.chmod(0o755)
    return {"PYTHON": "bin/python", "OUT": "found", "NOTES": str(tmp_path / "notes")}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_its_commands_can_be_given_and_run_on_the_device(tmp_path, noting, device):
    result = check(tmp_path, "--device", device, **noting)
    assert result.returncode == 0 and "... failed" not in result.stdout, result.stdout
    given = [line.split("\37")[:-1] for line in (tmp_path / "notes").read_text().splitlines()]
    commands = {}
    for words in given:
        if "swin_quant" in words:
            command, *rest = words[words.index("swin_quant") + 1 :]
            commands[command] = PARSERS[command].parse_args(rest)
    on_device = {"train", "calibrate", "evaluate", "finetune", "verify", "bench"}
    assert set(commands) == on_device | {"export"} | ({"tune"} if device == "cuda" else set())
    assert {commands[command].device for command in on_device} == {device}
    deployed = {str(commands[command].artifact) for command in commands if command in ("verify", "tune")}
    assert len(deployed) == 1 and commands["bench"].files == [*deployed]
    benchmarks = [words for words in given if words[0].startswith("benchmarks/")]
    assert all(Path(SCRIPT.parents[1], words[0]).is_file() for words in benchmarks)
    assert {Path(words[0]).stem for words in benchmarks} == {"cuda_engine", "cuda_accuracy", "memory", "qat_step"}


def test_what_is_wrong_is_known_before_anything_is_timed(tmp_path, noting):
    """Of an engine whose kernels are wrong, or a GPU on which arithmetic or NCCL is, no time is worth anything."""
    check(tmp_path, **noting)
    given = (tmp_path / "notes").read_text().splitlines()
    timed = next(n for n, line in enumerate(given) if "benchmarks/cuda_engine.py" in line and "--only" not in line)
    before = {word for line in given[:timed] for word in re.sub("--ignore\37[^\37]*\37", "", line).split("\37")}
    for tests in (
        "backends/cuda",
        "backends/cuda/kernels/test_sizes.py",
        "gpu/test_ranks.py",
        "gpu/test_arithmetic.py",
    ):
        assert f"tests/{tests}" in before and (SCRIPT.parents[1] / "tests" / tests).exists()


CLOCK = """timeout() {
    while [[ $1 == -* ]]; do shift 2; done
    printf '%s %s\\n' "$1" "${*:2}" >> "$LIMITS"
    SECONDS=$((SECONDS + $1 + 4))
    return 124
}
"""


@pytest.fixture
def slow(tmp_path):
    """By the script's clock every command takes all of its time, and some more to end; no time passes."""
    (tmp_path / "clock").write_text(CLOCK)
    return {"BASH_ENV": str(tmp_path / "clock"), "LIMITS": str(tmp_path / "limits")}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_slow_steps_leave_time_to_those_behind_them(tmp_path, noting, slow, device):
    result = check(tmp_path, "--device", device, **noting, **slow)
    assert result.returncode == 1 and "no time was left" not in result.stdout
    limits = [line.split(" ", 1) for line in (tmp_path / "limits").read_text().splitlines()]
    assert sum(int(limit) + 4 for limit, _ in limits) <= 540
    timed = [int(limit) for limit, step in limits if "benchmarks/cuda_engine.py" in step and "--only" not in step]
    assert len(timed) == 1 and timed[0] >= (140 if device == "cuda" else 20)


def test_without_xdist_it_says_so_and_goes_on(tmp_path, noting):
    file = tmp_path / "bin" / "python"
    file.write_text(file.read_text().replace("#!/bin/sh\n", '#!/bin/sh\n[ "$2" != "import xdist" ] || exit 1\n'))
    result = check(tmp_path, **noting)
    assert result.returncode == 0 and "no pytest-xdist here" in result.stdout
    assert "no pytest-xdist here" in (tmp_path / "found" / "summary.md").read_text()
    assert "pytest" in (tmp_path / "notes").read_text() and "\37-n\37" not in (tmp_path / "notes").read_text()


def test_a_step_that_takes_too_long_says_how_far_it_came(tmp_path, noting):
    file = tmp_path / "bin" / "python"
    hangs = (
        """case "$*" in *"tests/backends/cuda "*) trap 'echo "== 3 passed in 4s =="; exit 2' INT; sleep 60 ;; esac\n"""
    )
    file.write_text(file.read_text() + hangs)
    result = check(tmp_path, "--seconds", "30", **noting)
    assert result.returncode == 1
    shown = result.stdout.partition("# GPU check: ")[2]
    assert "| kernels |" in shown and "s: 3 passed in 4s |" in shown
    assert shown.index("## kernels failed") < shown.index("summary.md")
