"""QAT is compared with the user's float checkpoint, and with nothing where that is missing."""

import json
import shutil
from pathlib import Path

import pytest
from commands import command

from swin_quant.cards.card import RunCard
from swin_quant.checkpoint import save_float
from swin_quant.config import load_config
from swin_quant.models import build_model

ENGINES = ["--engine", "torchscript"]


@pytest.fixture(scope="session")
def _runs(tmp_path_factory, micro, calibrated, pictures) -> Path:
    """in/swin.yaml and .pth, ptq/swin_micro_calib.pth, and in out/ its 4-bit QAT, which changes the weights."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("swin.yaml", "swin.pth"):
        (root / "in").mkdir(exist_ok=True)
        shutil.copy(micro / name, root / "in")
    flags = [*flags_of(root, pictures), "--quiet"]
    calibrating = [*flags_of(root, pictures)[:-2], "--quiet"]
    calibration = ["--checkpoint", root / "in" / "swin.pth", "--pictures", 8, "--batch", 4]
    bits = ["--policy", "ft-mode1", "--wprec", 4]
    command("calibrate", *calibrating, *calibration, *bits, "--output", root / "ptq")
    command("evaluate", root / "ptq" / "swin_micro_calib.pth", *flags)
    (root / "recipe.yaml").write_text("epochs: 1\nbatch_size: 4\naugment: {crop: padded}\noptimizer: {lr: 1.0e-2}\n")
    start = ["--checkpoint", root / "ptq" / "swin_micro_calib.pth", "--recipe", root / "recipe.yaml"]
    command("finetune", *flags, *start, "--output", root / "out")
    return root


def flags_of(root, pictures):
    return ["--cfg", root / "in" / "swin.yaml", "--data-path", pictures, "--device", "cpu", "--half", "none"]


@pytest.fixture
def runs(_runs, tmp_path) -> Path:
    """A copy of those folders elsewhere, which a test may damage."""
    return Path(shutil.copytree(_runs, tmp_path / "runs"))


def qat(root) -> Path:
    return root / "out" / "swin_micro_qat.pth"


def same(result):
    """The loss of the same logits, up to the batch size over which it was summed in float64."""
    return pytest.approx(result.loss, rel=1e-12)


def measured(file):
    card = RunCard.read(Path(file).with_suffix(".json"))
    return {(result.weights, result.engine, result.precision): result for result in card.measured()}


FLOAT32, UNQUANTIZED = ("original", "torch", "float32"), ("qat", "torch", "float32")
PTQ, QAT = (("ptq", "torch fake-quant", "W4A8"), ("qat", "torch fake-quant", "W4A8"))


@pytest.fixture
def evaluate(run, runs, pictures):
    """evaluate(flags ...) scores the QAT checkpoint after deleting its earlier results."""

    def go(*flags):
        path = qat(runs).with_suffix(".json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "results": []}))
        return run("evaluate", *flags_of(runs, pictures), "--checkpoint", qat(runs), *flags)

    return go


def test_deltas_are_to_the_float_checkpoint_s_own_figures(_runs):
    found, ptq = measured(qat(_runs)), measured(_runs / "ptq" / "swin_micro_calib.pth")
    assert list(found) == [FLOAT32, PTQ, QAT, UNQUANTIZED]
    own = ptq[None, "torch", "float32"]
    assert (found[FLOAT32].acc1, found[FLOAT32].loss) == (own.acc1, pytest.approx(own.loss))  # the batches differ
    before = ptq[None, "torch fake-quant", "W4A8"]
    assert found[PTQ].delta_acc1 == before.delta_acc1
    assert (found[PTQ].loss, found[PTQ].sqnr_db) == pytest.approx((before.loss, before.sqnr_db))
    assert found[UNQUANTIZED].loss != own.loss and found[UNQUANTIZED].sqnr_db < 30, "it was trained"
    for key in (PTQ, QAT, UNQUANTIZED):
        assert found[key].delta_acc1 == pytest.approx(found[key].acc1 - own.acc1)
    assert found[FLOAT32].delta_acc1 is None


def test_without_the_original_there_are_results_and_no_delta(evaluate, runs, tmp_path):
    original = shutil.move(runs / "in" / "swin.pth", tmp_path / "kept.pth")
    shutil.rmtree(runs / "ptq")
    done = evaluate()
    assert done.code == 0
    (line,) = [line for line in done.err.splitlines() if line.startswith("warning")]
    assert "no delta" in line and "swin.pth" in line and "--float FILE" in line
    found = measured(qat(runs))
    assert list(found) == [QAT, UNQUANTIZED]
    for result in found.values():
        assert result.delta_acc1 is result.agreement is result.sqnr_db is None
    assert "there is no delta" in " ".join(done.out.split())
    given = evaluate("--float", original)
    assert given.code == 0 and list(measured(qat(runs))) == [FLOAT32, QAT, UNQUANTIZED]
    assert measured(qat(runs))[QAT].delta_acc1 is not None


def test_another_file_than_the_original_is_refused(evaluate, runs, micro, run, pictures):
    line = evaluate("--quiet", "--float", micro / "swinv2.pth").error(1)
    assert "swinv2.pth: is not the float checkpoint that the run began with, swin.pth: its SHA-256 is" in line
    line = run("evaluate", *flags_of(runs, pictures), "--checkpoint", runs / "in" / "swin.pth", "--float", "x").error(2)
    assert "--float x: the scored file is a float checkpoint itself" in line
    start = ["--checkpoint", runs / "ptq" / "swin_micro_calib.pth", "--recipe", runs / "recipe.yaml"]
    flags = [*flags_of(runs, pictures), *start, "--output", runs / "new", "--quiet", "--float", micro / "swinv2.pth"]
    assert "is not the float checkpoint" in run("finetune", *flags).error(1)
    assert not list(runs.glob("new/**/*.csv")), "refused before the first step"


def test_without_a_run_card_the_user_s_word_counts(run, runs, pictures, write_config, randomise, tmp_path):
    qat(runs).with_suffix(".json").unlink()
    flags = [*flags_of(runs, pictures), "--policy", "ft-mode1", "--wprec", 4, "--output", tmp_path / "eval"]
    scored = tmp_path / "eval" / "swin_micro_eval.pth"
    done = run("evaluate", *flags, "--checkpoint", qat(runs))
    assert done.code == 0 and "after QAT give --float FILE" in done.err
    assert run("evaluate", *flags, "--checkpoint", qat(runs), "--float", runs / "in" / "swin.pth").code == 0
    assert list(measured(scored)) == [FLOAT32, QAT, UNQUANTIZED]
    (runs / "ptq" / "swin_micro_calib.json").unlink()
    words = ["--checkpoint", runs / "ptq" / "swin_micro_calib.pth", "--float", runs / "in" / "swin.pth"]
    assert run("evaluate", *flags, *words).code == 0
    assert list(measured(scored)) == [(None, "torch", "float32"), (None, "torch fake-quant", "W4A8")], "PTQ only"

    config = write_config(tmp_path, "swin")
    config.write_text(config.read_text().replace("NUM_CLASSES: 3", "NUM_CLASSES: 4"))
    save_float(randomise(build_model(load_config(config))), tmp_path / "four.pth")
    refused = run("evaluate", *flags, "--checkpoint", qat(runs), "--float", tmp_path / "four.pth")
    *_, line = refused.err.splitlines()
    assert refused.code == 1 and line.startswith("error")
    assert "four.pth: does not fit the model: its head has 4 classes, MODEL.NUM_CLASSES is 3" in line
    assert "--opts" not in line and "--replace-head" not in line


def test_an_artifact_of_qat_in_a_sibling_folder(run, runs, pictures):
    folder = runs / "out" / "traced"
    run("export", qat(runs), "--for", "torchscript", "--policy", "qdq", "--output", folder).ok()
    (artifact,) = folder.glob("*.pt")
    assert str(runs) not in artifact.with_suffix(".json").read_text()
    flags = ["--data-path", pictures, "--device", "cpu", "--half", "none", *ENGINES]
    assert run("evaluate", artifact, *flags).code == 0
    found = measured(artifact)
    assert list(found) == [FLOAT32, ("qat", "TorchScript", "int8")]
    assert found[FLOAT32].loss == same(measured(qat(runs))[FLOAT32])
    assert found["qat", "TorchScript", "int8"].sqnr_db < 30
    qat(runs).unlink()
    shutil.rmtree(runs / "ptq")
    assert run("evaluate", artifact, *flags).code == 0, "the original is enough"
    original = shutil.move(runs / "in" / "swin.pth", runs / "kept.pth")
    lonely = run("evaluate", artifact, *flags)
    assert lonely.code == 0 and "no delta" in lonely.err and "--float FILE" in lonely.err
    assert run("evaluate", artifact, *flags, "--float", original).code == 0
    assert "is not the float checkpoint" in run("evaluate", artifact, *flags, "--float", artifact).error(1)
