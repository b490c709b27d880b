"""Ranges found for other bits, on the command line: refused in one line, or warned about."""

import pytest

import swin_quant as sq

NAME = "swin_micro_calib"
TRAIN = ["--epochs", 1, "--batch", 4, "--no-eval"]


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text("epochs: 1\naugment: {crop: padded}\n")
    return ["--recipe", tmp_path / "recipe.yaml"]


@pytest.fixture(scope="module")
def of_8_bits(float_flags, tmp_path_factory):
    """The folder of a calibration by least error at 8 bits."""
    from swin_quant.cli import main

    folder = tmp_path_factory.mktemp("mse8")
    words = [*float_flags, "--calibrator", "mse", "--policy", "ft-mode1", "--output", folder]
    assert main(["calibrate", *map(str, words)]) == 0
    return folder


@pytest.mark.slow
def test_other_bits_are_refused_until_they_are_calibrated(run, scoring_flags, of_8_bits, float_flags, tmp_path):
    four = ["--policy", "ft-mode1", "--aprec", 4]
    line = run("evaluate", *scoring_flags, "--checkpoint", of_8_bits / f"{NAME}.pth", *four).error(2)
    assert (
        "found by mse for 8 bits" in line and "ft-mode1 A4 has 4" in line and "calibrate the float checkpoint" in line
    )
    direct = [*float_flags, "--calibrator", "mse", *four, "--output", tmp_path / "direct"]
    assert run("calibrate", *direct).code == 0
    file = tmp_path / "direct" / f"{NAME}.pth"
    assert run("evaluate", *scoring_flags, "--checkpoint", file, *four).code == 0
    assert "for 4 bits" in run("evaluate", *scoring_flags, "--checkpoint", file, "--policy", "ft-mode1").error(2)


@pytest.mark.slow
def test_export_and_training_refuse_them_unless_that_finds_new_ones(run, scoring_flags, of_8_bits, tmp_path, recipe):
    four = tmp_path / "four.yaml"
    four.write_text("name: four\nrules:\n- {enable: ['role:gemm_input', 'role:gemm_weight'], bits: 4}\n")
    file = of_8_bits / f"{NAME}.pth"
    where = ["--checkpoint", file, "--for", "onnx", "--output", tmp_path / "out", "--policy", four]
    assert "found by mse for 8 bits" in run("export", *where).error(2)
    train = [*scoring_flags, "--checkpoint", file, "--policy", "ft-mode1", "--aprec", 4, *TRAIN, *recipe]
    assert "found by mse for 8 bits" in run("finetune", *train, "--output", tmp_path / "qat").error(2)
    anew = ["--set", "amax.initial=reestimated", "amax.batches=1"]
    assert run("finetune", *train, "--output", tmp_path / "qat", *anew).code == 0


@pytest.mark.nightly
def test_learned_ranges_ask_for_training(run, scoring_flags, calibrated, tmp_path, card_of, recipe):
    made = []
    for start, how in ((calibrated, "learned"), (tmp_path / "0", "frozen")):
        start = start / "swin_micro_qat.pth" if start.is_dir() else start
        folder = tmp_path / str(len(made))
        train = ["--checkpoint", start, "--amax", how, *TRAIN, *recipe, "--output", folder]
        assert run("finetune", *scoring_flags, *train).code == 0
        made.append(folder / "swin_micro_qat.pth")
        assert card_of(made[-1])["training"]["ranges"] == {"weights": "learned", "activations": "learned"}
        line = run("evaluate", *scoring_flags, "--checkpoint", made[-1], "--policy", "ft-mode1", "--wprec", 4).error(2)
        assert "learned for 8 bits" in line and "finetune with these bits" in line
    sq.load(made[0]).save(tmp_path / "plain.pth", dtype="float32")
    assert card_of(tmp_path / "plain.pth")["training"]["ranges"] == {"weights": None, "activations": None}
