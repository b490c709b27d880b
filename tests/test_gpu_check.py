"""scripts/gpu_check.py with an interpreter that only notes its arguments: its steps, limits, refusals and archive."""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from shown import PARSERS

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check.sh"
NOTING = """#!/bin/sh
{{ printf '%s\\037' "$@"; echo; }} >> {notes}
case "$*" in *gpu_environment*) echo "made with a stub" ;; esac
{more}
echo "== 1 passed in 1s =="
"""


@pytest.fixture
def script(monkeypatch):
    """The module of the script."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_check

    return gpu_check


@pytest.fixture
def check(script, tmp_path, monkeypatch, capsys):
    """check(*flags, does="shell lines of the interpreter") -> exit code, what it printed, and the summary."""
    python = tmp_path / "python"

    def run(*flags, does=""):
        python.write_text(NOTING.format(notes=tmp_path / "notes", more=does))
        python.chmod(0o755)
        (tmp_path / "notes").unlink(missing_ok=True)
        monkeypatch.setenv("OUT", str(tmp_path / "found"))
        code = script.main([*map(str, flags)], str(python))
        summary = tmp_path / "found" / "summary.md"
        return SimpleNamespace(
            code=code, shown=capsys.readouterr(), summary=summary.read_text() if summary.is_file() else ""
        )

    return run


def noted(tmp_path):
    """The arguments of every call of that interpreter."""
    return [line.split("\37")[:-1] for line in (tmp_path / "notes").read_text().splitlines()]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--device", "tpu"), "invalid choice: 'tpu'"),
        (("--seconds", "nine"), "invalid int value: 'nine'"),
        (("--seconds", "0"), "--seconds 0: 10 or more"),
        (("--fast",), "unrecognized arguments: --fast"),
        (("--only", "kernel"), "--only kernel: it is one of environment, compile_ahead, kernels"),
        (("--wheels", "none"), "--wheels none: holds no wheel: scripts/gpu_wheels.sh none downloads them"),
    ],
)
def test_what_it_does_not_know_is_refused(check, tmp_path, capsys, flags, said):
    try:
        found = check(*flags)
        assert found.code == 2 and said in found.shown.err
    except SystemExit as ended:
        assert ended.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "found").exists()


def archived(file, **files):
    with tarfile.open(file, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_an_archive_of_something_else_is_refused(check, tmp_path, capsys):
    file = tmp_path / "other.tar.gz"
    (tmp_path / "folder").mkdir()
    for made in (
        lambda: None,
        lambda: file.write_text("no archive"),
        lambda: archived(file, readme=b"of another program"),
        lambda: archived(file, **{"run.json": b"[]"}),
        lambda: archived(file, **{"run.json": b'{"conditions": "", "steps": {"train": 1}}'}),
        lambda: archived(file, **{"run.json": b'{"conditions": "", "steps": {"train": {"said": "passed"}}}'}),
    ):
        made()
        for given in (file, tmp_path / "folder"):
            with pytest.raises(SystemExit) as ended:
                check("--go-on", given)
            assert ended.value.code == 2
            assert f"--go-on {given}: is no gpu_check.tar.gz of an earlier run" in capsys.readouterr().err
    assert not (tmp_path / "found").exists()


def test_two_files_hold_everything(check, tmp_path):
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "mine").touch()
    found = check()
    assert {file.name for file in (tmp_path / "found").iterdir()} == {"mine", "summary.md", "gpu_check.tar.gz"}
    with tarfile.open(tmp_path / "found" / "gpu_check.tar.gz") as archive:
        names = set(archive.getnames())
        assert archive.extractfile("summary.md").read().decode() == found.summary
    steps = {line.split(" ")[1] for line in found.summary.splitlines() if line.endswith("passed in 1s |")}
    assert {"kernels", "tests"} <= steps and {f"{name}.log" for name in steps} | {"run.json"} <= names
    assert len(found.summary.splitlines()) < 70


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_its_commands_can_be_given_and_run_on_the_device(check, tmp_path, device):
    result = check("--device", device)
    assert result.code == 0 and "... failed" not in result.shown.out, result.shown.out
    given = noted(tmp_path)
    commands, unsaid = {}, {"float_type": None, "uint8_input": False, "logits": False, "files": ()}
    for words in given:
        if "swin_quant" in words:
            place = words.index("swin_quant") + 1
            command = words[place]
            said = unsaid | PARSERS[command].parse(words[place + 1 :])
            commands.setdefault(command, []).append(SimpleNamespace(**said))
    on_device = {"train", "calibrate", "evaluate", "finetune", "verify", "predict", "align", "bench"}
    assert set(commands) == on_device | {"export"}
    assert {one.device for command in on_device for one in commands[command]} == {device}
    files = {str(one.artifact) for one in commands["verify"]}
    tuned = {words[1] for words in given if words[0] == "tools/cuda/tune.py"}
    assert tuned == (files if device == "cuda" else set())
    assert len(files) == 1 and {*commands["bench"][0].files} == files and commands["align"][0].b in files
    forms = {(*one.policy, one.float_type, one.uint8_input): one.folder for one in commands["export"]}
    assert {("cuda", "bfloat16"), ("cuda-fp8", None)} <= {form[:2] for form in forms} and len(forms) == 4
    evaluated = [str(Path(file).parent) for one in commands["evaluate"] for file in one.files]
    assert sorted(evaluated) == sorted(forms.values())  # each form in its export folder
    logits, shown = commands["predict"]
    assert logits.logits and logits.checkpoint in files and shown.checkpoint.endswith("_int8_uint8_cuda.safetensors")
    assert all((SCRIPT.parents[1] / image).is_file() for image in shown.images)
    benchmarks = [words for words in given if words[0].startswith("benchmarks/")]
    assert all(Path(SCRIPT.parents[1], words[0]).is_file() for words in benchmarks)
    assert {Path(words[0]).stem for words in benchmarks} == {"cuda_engine", "training"}


def test_what_a_gpu_has_not_is_skipped_with_its_reason(check, tmp_path):
    fact = "no float8: the GPU is of 8.0"
    found = check(does=f"case \"$*\" in *gpu_environment*) echo '{fact}' ;; esac")
    assert found.code == 0 and f"| export_fp8 | 0 | skipped: {fact} |" in found.summary
    (evaluated,) = (words for words in noted(tmp_path) if "evaluate" in words and "--policy" not in words)
    assert not any("fp8" in word for word in evaluated) and any("bfloat16" in word for word in evaluated)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_slow_steps_leave_time_to_those_behind_them(script, check, monkeypatch, device):
    """By the script's clock every command but the first takes all of its time, and some more to end."""
    clock, limits = [0.0], []

    def finished(command, limit, log, environment):
        if "scripts/gpu_environment.py" in command:
            clock[0] += 8
        else:
            limits.append((limit, command))
            clock[0] += limit + 4
        log.write("made with a stub\n1 passed in 1s\n")
        return 0

    here = SimpleNamespace(monotonic=lambda: clock[0], strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(script, "time", here)
    monkeypatch.setattr(script, "finished", finished)
    result = check("--device", device)
    assert result.code == 0 and "no time was left" not in result.summary
    assert sum(limit + 4 for limit, _ in limits) <= 560 and min(limit for limit, _ in limits) >= 3
    timed = [limit for limit, words in limits if "benchmarks/cuda_engine.py" in words and "--only-compile" not in words]
    assert len(timed) == 1 and timed[0] >= (140 if device == "cuda" else 20)


FAILS = 'case "$*" in *" export "*) case "$*" in *bfloat16*) exit 3 ;; esac ;; esac'


def test_it_goes_on_where_an_earlier_run_ended(script, check, tmp_path, monkeypatch):
    found = check(does=FAILS)
    assert found.code == 1 and "| export_bfloat16 | 0 | failed: exit code 3 |" in found.summary
    assert "| evaluate | 0 | failed: it needs export_bfloat16, which failed |" in found.summary
    archive = (tmp_path / "found" / "gpu_check.tar.gz").rename(tmp_path / "gpu_check.tar.gz")
    folder = tmp_path / "unpacked"
    folder.mkdir()
    with tarfile.open(archive) as opened:
        for name in opened.getnames():
            (folder / name).write_bytes(opened.extractfile(name).read())
    needed = ["train", "calibrate", "export", "export", "export", "export", "evaluate"]
    whole = tmp_path / "whole"
    whole.mkdir()
    shutil.copy(archive, whole)
    for given in (archive, whole, folder):
        found = check("--go-on", given)
        words = [words[words.index("swin_quant") + 1] for words in noted(tmp_path)[1:]]
        assert words == needed and found.code == 0 and "0 of 25 steps failed" in found.summary
        assert "it goes on from an earlier run, in which 23 steps passed" in found.summary
    monkeypatch.setattr(script, "sources", lambda: "edited")
    found = check("--go-on", folder, "--only", "train")
    assert "other versions or other sources: every step is run anew" in found.summary
    assert len(noted(tmp_path)) == 2 and "of 2 steps failed" in found.summary


def wheel(folder, tag, module):
    with zipfile.ZipFile(folder / f"{module}-1.0-{tag}.whl", "w") as made:
        made.writestr(f"{module}.py", "VALUE = 7\n")


def test_wheels_of_this_python_are_used_and_others_named(check, tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "py3-none-any", "fitting")
    wheel(folder, "cp27-cp27m-win32", "foreign")
    (folder / "broken-1.0-py3-none-any.whl").write_text("no zip")
    imports = f'{sys.executable} -c "import fitting; print(fitting.VALUE)" || exit 4'
    found = check("--only", "train", "--wheels", folder, does=imports)
    assert found.code == 0 and "1 wheels of wheels are used" in found.summary
    named = "broken-1.0-py3-none-any.whl, foreign-1.0-cp27-cp27m-win32.whl"
    assert f"not for this Python or broken: {named}: scripts/gpu_wheels.sh --python 3." in found.summary


@pytest.mark.slow
def test_a_dry_run_of_the_steps_that_everything_else_needs(tmp_path):
    words = [SCRIPT, "--device", "cpu", "--seconds", "900", "--only", "cuda_engine", "score", "verify"]
    given = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    found = subprocess.run(words, capture_output=True, text=True, env=given)
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search("# DRY RUN of the GPU check on a CPU: 0 of [0-9]+ steps failed", found.stdout)
    with tarfile.open(tmp_path / "gpu_check.tar.gz") as archive:
        page = archive.extractfile("cuda_engine.md").read().decode()
    assert "int8 ms" in page and "trace fp16 ms" in page and "Failed" not in page
