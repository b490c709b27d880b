"""Ranges found for other bits, on the command line: refused in one line, or warned about."""

import pytest

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
