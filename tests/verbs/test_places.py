"""Several results in one folder: a checkpoint that other files were made from is not replaced, and all can be
verified."""

import pytest

import swin_quant as sq
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.base.files import compute_sha256

FOR = ("--for", "torchscript")


@pytest.fixture
def calibrate(run, float_flags, tmp_path):
    """calibrate(flags ...) -> the checkpoint written in the folder, and the messages."""

    def go(*flags):
        done = run("calibrate", *float_flags, "--output", tmp_path, *flags).ok()
        line = next(line for line in done.err.splitlines() if line.startswith("calibrated checkpoint: "))
        return line.removeprefix("calibrated checkpoint: "), done.err

    return go


@pytest.mark.slow
def test_another_calibration_does_not_replace_what_an_artifact_was_made_of(run, calibrate, tmp_path):
    otherwise = ("--policy", "qdq", "--calibrator", "max")
    first, _ = calibrate("--policy", "qdq")
    exported = run("export", first, *FOR, "--output", tmp_path)
    artifact = open_artifact(exported.out.strip())
    again, said = calibrate("--policy", "qdq")
    assert again == first and "stays" not in said  # the same result
    second, said = calibrate(*otherwise)
    assert second == str(tmp_path / f"swin_micro_calib_{otherwise[1]}.pth")
    assert f"{first} stays, because " in said
    assert f"{artifact.file.name} was made from it: this calibration is written" in said
    assert compute_sha256(first) == artifact.card.checkpoint["sha256"] != compute_sha256(second)
    assert calibrate(*otherwise)[0] == second  # replaced: nothing was made from it, and it is the same
    other = run("export", second, *FOR, "--output", tmp_path / "other")
    third, _ = calibrate(*otherwise, "--pictures", 2)
    assert other.code == 0 and third == str(tmp_path / f"swin_micro_calib_{otherwise[1]}_2.pth")
    assert calibrate(*otherwise)[0] == second


@pytest.mark.nightly
def test_a_file_that_qat_started_from_stays_too(run, calibrate, float_flags, scoring_flags, tmp_path):
    first, _ = calibrate("--policy", "qdq")
    recipe = tmp_path / "one.yaml"
    recipe.write_text("epochs: 1\nbatch_size: 4\naugment: {crop: padded}\n")
    told = ("--recipe", recipe, "--no-eval", "--output", tmp_path)
    assert run("finetune", *scoring_flags, "--checkpoint", first, *told).code == 0
    second, said = calibrate("--policy", "qdq", "--calibrator", "max")
    assert second == str(tmp_path / "swin_micro_calib_qdq.pth") and "swin_micro_qat.pth was made from it" in said
    qat = tmp_path / "swin_micro_qat.pth"
    assert run("export", qat, *FOR, "--output", tmp_path).code == 0
    refused = run("finetune", *scoring_flags, "--checkpoint", first, *told, "--overwrite").error(2)
    assert "swin_micro_qat.pth: " in refused and "was made of what lies there" in refused
    with pytest.raises(sq.UsageError, match="was made of what lies there"):
        sq.load(float_flags[3], float_flags[1]).save(qat)
