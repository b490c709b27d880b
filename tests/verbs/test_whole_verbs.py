"""`sq.quantize` and `sq.finetune` do what the commands do: the same files, table and verdict, in a shell and a
notebook."""

import inspect

import pytest
from nightly import share
from torch import nn

import swin_quant as sq
from swin_quant.base.files import compute_sha256
from swin_quant.verbs import quantize

SMALL = {"epochs": 1, "batch_size": 4}
VAL = 7  # pictures


@pytest.fixture
def file(micro):
    return micro / "swin.pth", micro / "swin.yaml"


def is_said(result):
    """Whether the verdict ends what is printed, in narrow lines, and stands in the notebook's tables."""
    lines = str(result).replace("\\\n", "").splitlines()  # a long command is broken
    at = next(number for number, line in enumerate(lines) if line.startswith("deploy:"))
    assert lines[-1].startswith("next:") and max(map(len, lines[:at])) <= 100
    page = result._repr_html_()
    return "<table>" in page and page.count("deploy") and result.verdict.deploy in str(result)


@pytest.mark.slow
def test_quantize_is_the_command_and_goes_on_where_it_was_cut_off(file, pictures, tmp_path, run):
    checkpoint, config = file
    place, out = sq.pictures(pictures, "train", 8), tmp_path / "python"
    made = sq.quantize(checkpoint, place, "onnxruntime", out, config=config)
    words = ["--cfg", config, "--data-path", pictures, "--pictures", 8, "--for", "onnxruntime"]
    assert run("quantize", checkpoint, *words, "--output", tmp_path / "command", "--device", "cpu").code == 0
    theirs = tmp_path / "command" / made.artifact.file.name
    assert compute_sha256(made.artifact.file) == compute_sha256(theirs)
    assert is_said(made) and made.verdict.pictures == VAL and made.evaluation.quantized.delta_acc1_se is not None
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert str(sq.quantize(checkpoint, place, "onnxruntime", out, config=config)) == str(made)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


@pytest.mark.slow
def test_quantize_in_memory_does_all_that_it_is_asked_for(model, pictures, tmp_path, heard):
    """Each argument reaches the step that it is for; a new one has to be named here."""
    calibrate, _, verify, evaluate = (heard(quantize, name) for name in ("calibrate", "export", "verify", "evaluate"))
    asked = {"method": "percentile", "percentile": 99.5, "exact": True, "passes": ["bias_correction"]}
    timing = {"threads": 1, "float_type": "float32"}
    place = sq.pictures(pictures, "train", 8, seed=3, upright=False)
    made = sq.quantize(model, place, "onnxruntime", tmp_path, sq.policy("qdq"), half="none", **asked, **timing)
    assert asked.items() <= calibrate[0].items() and timing.items() <= verify[0].items()
    assert (timing | {"half": "none"}).items() <= evaluate[0].items()
    assert is_said(made) and made.verdict.pictures == VAL
    record = made.artifact.card.calibration
    assert (record["percentile"], record["exact"], record["seed"], record["split"]) == (99.5, True, 3, "train")
    assert {result.precision for result in made.evaluation.results} == {"float32", "int8"}
    known = {"model", "pictures", "backend", "folder", "policy", "scored_on", "half", *asked, *timing}
    elsewhere = {"config", "dry_run", "budget", "int4_weights", "tune"}  # test_search.py, test_said_before.py
    assert {*inspect.signature(sq.quantize).parameters} == known | elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", share([False, True], 2))
def test_finetune_is_the_command(model, train, pictures, tmp_path, in_memory):
    sq.calibrate(model, train, "ft-mode1")
    start = model if in_memory else model.save(tmp_path / "start" / "swin_micro_calib.pth")
    tuned = sq.finetune(start, pictures, tmp_path / "out", "qat_tiny", changes={"augment.crop": "padded"}, **SMALL)
    assert is_said(tuned) and tuned.file == tmp_path / "out" / "swin_micro_qat.pth"
    assert tuned.verdict.delta_ptq_se is not None and "QAT - PTQ" in str(tuned).replace("\n        ", " ")
    assert tuned.load().card.is_qat and tuned.load().policy.name == "ft-mode1"
    with pytest.raises(sq.UsageError, match=r"resume goes on with it, overwrite replaces it, or another folder"):
        sq.finetune(start, pictures, tmp_path / "out", **SMALL)


def test_invalid_arguments_are_refused_before_any_work(model, file, train, tensors, tmp_path):
    checkpoint, config = file
    own, place, batches = sq.wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), 2), train.path, tensors("train")
    changed, budget = {"changes": {"optimizer.rl": 1}, "config": config}, sq.Budget(max_drop=0.1)
    for says, call in (
        ("a budget needs .*auto", lambda: sq.quantize(model, batches, "onnxruntime", tmp_path, budget=budget)),
        ("dry_run prints commands", lambda: sq.quantize(model, train, "onnxruntime", tmp_path, dry_run=True)),
        ("config is for a checkpoint", lambda: sq.quantize(model, train, "onnxruntime", tmp_path, config=config)),
        ("onnxruntim.*onnxruntime", lambda: sq.quantize(model, train, "onnxruntim", tmp_path)),
        ("is a float model: calibrate it first", lambda: sq.finetune(model, place, tmp_path)),
        ("train and val of a place on disk", lambda: sq.finetune(model, train, tmp_path)),
        ("your own loop", lambda: sq.finetune(own, place, tmp_path)),
        ("changes: .*optimizer.rl.*optimizer.lr", lambda: sq.finetune(checkpoint, place, tmp_path, **changed)),
    ):
        with pytest.raises(sq.UsageError, match=says):
            call()
    assert not list(tmp_path.iterdir())
