"""scripts/gpu_check.py with an interpreter that only notes its arguments: its steps, limits, refusals and archive."""

import tarfile
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


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_its_commands_can_be_given_and_run_on_the_device(check, tmp_path, device):
    result = check("--device", device)
    assert result.code == 0 and "... failed" not in result.shown.out, result.shown.out
    given = noted(tmp_path)
    commands = {}
    unsaid = {"float_type": None, "uint8_input": False, "logits": False, "files": (), "no_accuracy": False}
    for words in given:
        if "swin_quant" in words:
            place = words.index("swin_quant") + 1
            command = words[place]
            said = unsaid | PARSERS[command].parse(words[place + 1 :])
            commands.setdefault(command, []).append(SimpleNamespace(**said))
    on_device = {"train", "calibrate", "evaluate", "finetune", "verify", "predict", "align"}
    assert set(commands) == on_device | {"export"}
    assert {one.device for command in on_device for one in commands[command]} == {device}
    files = {str(one.artifact) for one in commands["verify"]}
    tuned = {words[1] for words in given if words[0] == "tools/cuda/tune.py"}
    assert tuned == (files if device == "cuda" else set())
    timed = [{*one.files} for one in commands["evaluate"] if one.no_accuracy]
    assert len(files) == 1 and timed == [files] and commands["align"][0].b in files
    forms = {(*one.policy, one.float_type, one.uint8_input): one.folder for one in commands["export"]}
    assert {("cuda", "bfloat16"), ("cuda-fp8", None)} <= {form[:2] for form in forms} and len(forms) == 4
    evaluated = [str(Path(file).parent) for one in commands["evaluate"] if not one.no_accuracy for file in one.files]
    assert sorted(evaluated) == sorted(forms.values())  # each form in its export folder
    logits, shown = commands["predict"]
    assert logits.logits and logits.checkpoint in files and shown.checkpoint.endswith("_int8_uint8_cuda.safetensors")
    assert all((SCRIPT.parents[1] / image).is_file() for image in shown.images)
    benchmarks = [words for words in given if words[0].startswith("benchmarks/")]
    assert all(Path(SCRIPT.parents[1], words[0]).is_file() for words in benchmarks)
    assert {Path(words[0]).stem for words in benchmarks} == {"cuda_engine", "training"}


FAILS = 'case "$*" in *" export "*) case "$*" in *bfloat16*) exit 3 ;; esac ;; esac'


@pytest.mark.nightly
def test_it_goes_on_where_an_earlier_run_ended(script, check, tmp_path, monkeypatch):
    found = check(does=FAILS)
    assert found.code == 1 and "| export_bfloat16 | 0 | failed: exit code 3 |" in found.summary
    assert "| evaluate | 0 | failed: it needs export_bfloat16, which failed |" in found.summary
    archive = (tmp_path / "found" / "gpu_check.tar.gz").rename(tmp_path / "gpu_check.tar.gz")
    folder = tmp_path / "unpacked"
    folder.mkdir()
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    needed = ["train", "calibrate", "export", "export", "export", "export", "evaluate"]
    for given in (archive, folder):
        found = check("--go-on", given)
        words = [words[words.index("swin_quant") + 1] for words in noted(tmp_path)[1:]]
        assert words == needed and found.code == 0 and "0 of 25 steps failed" in found.summary
        assert "it goes on from an earlier run, in which 23 steps passed" in found.summary
    monkeypatch.setattr(script, "sources", lambda: "edited")
    found = check("--go-on", folder, "--only", "train")
    assert "other versions or other sources: every step is run anew" in found.summary
    assert len(noted(tmp_path)) == 2 and "of 2 steps failed" in found.summary
