"""scripts/gpu_check.py with an interpreter that only notes its arguments: the commands of its steps."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from nightly import share
from shown import PARSERS

ROOT = Path(__file__).resolve().parents[1]
NOTING = """#!/bin/sh
{{ printf '%s\\037' "$@"; echo; }} >> {notes}
case "$*" in *gpu_environment*) echo "made with a stub" ;; esac
echo "== 1 passed in 1s =="
"""
UNSAID = {"float_type": None, "uint8_input": False, "logits": False, "files": (), "no_accuracy": False}


@pytest.mark.parametrize("device", share(["cuda", "cpu"], 2))
def test_its_commands_can_be_given_and_run_on_the_device(tmp_path, monkeypatch, capsys, device):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import gpu_check

    python, notes = tmp_path / "python", tmp_path / "notes"
    python.write_text(NOTING.format(notes=notes))
    python.chmod(0o755)
    monkeypatch.setenv("OUT", str(tmp_path / "found"))
    code, shown = gpu_check.main(["--device", device], str(python)), capsys.readouterr().out
    assert code == 0 and "... failed" not in shown, shown
    given = [line.split("\37")[:-1] for line in notes.read_text().splitlines()]
    commands = {}
    for words in (words[words.index("swin_quant") + 1 :] for words in given if "swin_quant" in words):
        said = SimpleNamespace(**UNSAID | PARSERS[words[0]].parse(words[1:]))
        commands.setdefault(words[0], []).append(said)
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
    (classes,) = commands["predict"]
    assert classes.checkpoint.endswith("_int8_uint8_cuda.safetensors")
    benchmarks = {words[0] for words in given if words[0].startswith("benchmarks/")}
    assert benchmarks == {"benchmarks/cuda_engine.py", "benchmarks/training.py"}
    assert all((ROOT / file).is_file() for file in (*benchmarks, *classes.images))
