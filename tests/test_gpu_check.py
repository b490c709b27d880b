"""scripts/gpu_check.sh before its first step: refusals, deleted files and missing parts; and its steps."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shown import PARSERS

from swin_quant.cli.commands import GROUPS

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check.sh"


def check(folder, *flags, **environment):
    return subprocess.run(
        [SCRIPT, *flags], cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def bare(tmp_path):
    """An interpreter without any package, found from the script's working directory."""
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
    for name in ("README.md", "mine.log", "kernels.log", "memory.md", "cuda_engine.json"):
        (out / name).write_text("before")
    (out / "steps.tsv").write_text("kernels\t3\tpassed\n")
    check(tmp_path, **bare)
    assert {file.name for file in out.iterdir()} == {
        "README.md",
        "mine.log",
        "cuda_engine.json",  # the next run goes on with it
        "environment.log",
        "steps.tsv",
        "summary.md",
    }


@pytest.fixture
def noting(tmp_path):
    """An interpreter that does nothing but note its arguments."""
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin" / "python"
    file.write_text('#!/bin/sh\n{ printf \'%s\\037\' "$@"; echo; } >> "$NOTES"\necho 1 passed\n')
    file.chmod(0o755)
    return {"PYTHON": "bin/python", "OUT": "found", "NOTES": str(tmp_path / "notes"), "CIFAR": "digits"}


def noted(tmp_path):
    """The arguments of every call of that interpreter."""
    return [line.split("\37")[:-1] for line in (tmp_path / "notes").read_text().splitlines()]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_its_commands_can_be_given_and_run_on_the_device(tmp_path, noting, device):
    result = check(tmp_path, "--device", device, **noting)
    assert result.returncode == 0 and "... failed" not in result.stdout, result.stdout
    given = noted(tmp_path)
    commands = {}
    for words in given:
        if "swin_quant" in words:
            place = words.index("swin_quant") + 1
            size = 2 if words[place] in GROUPS else 1
            command = " ".join(words[place : place + size])
            commands.setdefault(command, []).append(PARSERS[command].parse_args(words[place + size :]))
    on_device = {"train", "calibrate", "evaluate", "finetune", "verify", "predict", "align", "bench"}
    assert set(commands) == on_device | {"export"} | ({"cuda tune"} if device == "cuda" else set())
    assert {one.device for command in on_device for one in commands[command]} == {device}
    files = {str(one.artifact) for command in ("verify", "cuda tune") for one in commands.get(command, ())}
    assert len(files) == 1 and commands["bench"][0].files == [*files] and commands["align"][0].b in files
    forms = {(*one.policy, one.float_type, one.uint8_input): one.output for one in commands["export"]}
    assert {("cuda", "bfloat16"), ("cuda-fp8", None)} <= {form[:2] for form in forms} and len(forms) == 4
    evaluated = [str(Path(file).parent) for one in commands["evaluate"] for file in one.files]
    assert sorted(evaluated) == sorted(forms.values())  # each form in its export folder
    logits, shown = commands["predict"]
    assert logits.logits and logits.model in files and shown.model.endswith("_int8_uint8_cuda.safetensors")
    assert all((SCRIPT.parents[1] / image).is_file() for image in shown.images)
    benchmarks = [words for words in given if words[0].startswith("benchmarks/")]
    assert all(Path(SCRIPT.parents[1], words[0]).is_file() for words in benchmarks)
    assert {Path(words[0]).stem for words in benchmarks} == {
        "cuda_engine",
        "cuda_accuracy",
        "memory",
        "qat_step",
        "serve",
    }


def accuracy(tmp_path):
    """The arguments of the step."""
    return next(words for words in noted(tmp_path) if words[0] == "benchmarks/cuda_accuracy.py")


def test_accuracy_is_told_to_0_02_points_of_v1_and_v2_under_every_policy(tmp_path, noting):
    check(tmp_path, **noting)
    words = accuracy(tmp_path)
    assert 100 / int(words[words.index("--pictures") + 1]) <= 0.02
    assert {"cuda", "cuda-fp8", "ft-mode1", "ft-mode2"} <= set(words) and "digits" in words
    models = [word.partition("=") for word in words if word.startswith("swin")]
    trained = [words[words.index("--output") + 1] for words in noted(tmp_path) if "train" in words]
    assert [cfg for cfg, _, _ in models] == ["swin_digits", "swinv2_digits"]
    assert [str(Path(file).parent) for _, _, file in models] == trained


def test_accuracy_is_that_of_cifar_10_where_it_is_given(tmp_path, noting):
    (tmp_path / "cifar").mkdir()
    (tmp_path / "cifar" / "val.zip").touch()
    result = check(tmp_path, **noting | {"CIFAR": "cifar"})
    words = accuracy(tmp_path)
    assert words[words.index("--data-path") + 1] == str(tmp_path / "cifar") and "--models" not in words
    assert "train_v2 ... skipped: it is for accuracy on the digits" in result.stdout
    assert "| train_v2 | 0 | skipped: " in (tmp_path / "found" / "summary.md").read_text()
    result = check(tmp_path, **noting | {"CIFAR": "none"})
    assert result.returncode == 2 and f"CIFAR {tmp_path / 'none'}: holds no val.zip" in result.stderr


def test_what_a_gpu_or_a_machine_has_not_is_skipped_with_its_reason(tmp_path, noting):
    file = tmp_path / "bin" / "python"
    old = (
        """case "$*" in *environment*) echo "no float8: the GPU is of 8.0" ;; "-c import starlette"*) exit 1 ;; esac"""
    )
    file.write_text(file.read_text() + f"{old}\n")
    result = check(tmp_path, **noting)
    summary = (tmp_path / "found" / "summary.md").read_text()
    assert result.returncode == 0 and "| export_fp8 | 0 | skipped: no float8: the GPU is of 8.0 |" in summary
    assert "| serve | 0 | skipped: no starlette" in summary
    (evaluated,) = (words for words in noted(tmp_path) if "evaluate" in words and "--policy" not in words)
    assert not any("fp8" in word for word in evaluated) and any("bfloat16" in word for word in evaluated)


def test_what_is_wrong_is_known_before_anything_is_timed(tmp_path, noting):
    """Times of an engine with wrong kernels, or on a GPU with wrong arithmetic or NCCL, are worthless."""
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


@pytest.mark.parametrize(("capability", "said"), [((8, 0), True), ((8, 9), False), ((12, 0), False)])
def test_an_old_gpu_is_said_to_have_no_float8(monkeypatch, capsys, capability, said):
    there = {
        "is_available": True,
        "mem_get_info": (1, 1),
        "get_device_name": "A100",
        "get_device_capability": capability,
    }
    for name, value in there.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    runpy.run_path(str(SCRIPT.with_name("gpu_environment.py")))["main"]("cuda")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("no float8: ") for line in lines) == said


CLOCK = """timeout() {
    while [[ $1 == -* ]]; do shift 2; done
    printf '%s %s\\n' "$1" "${*:2}" >> "$LIMITS"
    SECONDS=$((SECONDS + $1 + 4))
    return 124
}
"""


@pytest.fixture
def slow(tmp_path):
    """By the script's clock every command takes all of its time, and some more to end; no real time passes."""
    (tmp_path / "clock").write_text(CLOCK)
    return {"BASH_ENV": str(tmp_path / "clock"), "LIMITS": str(tmp_path / "limits")}


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_step_that_takes_too_long_says_how_far_it_came(tmp_path, noting):
    file = tmp_path / "bin" / "python"
    hangs = (
        """case "$*" in *"tests/backends/cuda "*) trap 'echo "== 3 passed in 4s =="; exit 2' INT; sleep 60 ;; esac\n"""
    )
    file.write_text(file.read_text() + hangs)
    result = check(tmp_path, "--seconds", "50", **noting)
    assert result.returncode == 1
    shown = result.stdout.partition("# GPU check: ")[2]
    assert "| kernels |" in shown and "s: 3 passed in 4s |" in shown
    assert shown.index("## kernels failed") < shown.index("summary.md")
