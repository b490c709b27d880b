"""Advice and calibrator auto as a user meets them: on the screen, in the run card, in the report, and on engines."""

import pytest
from PIL import Image

FILE = "swin_micro_calib.pth"


def kinds(card):
    return [one["kind"] for one in card["calibration"]["advice"]]


@pytest.mark.slow
def test_auto_is_recorded_node_by_node_and_exported(run, float_flags, scoring_flags, card_of, tmp_path):
    flags = [*float_flags, "--policy", "ft-mode1", "--aprec", 5, "--calibrator", "auto"]
    done = run("calibrate", *flags, "--output", tmp_path)
    assert done.code == 0 and "calibrator auto: " in done.err, done
    record = card_of(tmp_path / FILE)["calibration"]
    assert set(record["node_methods"].values()) <= {"max", "percentile", "mse", "entropy"} - set(record["methods"])
    five = [*scoring_flags, "--checkpoint", tmp_path / FILE, "--policy", "ft-mode1", "--aprec"]
    assert run("evaluate", *five, 5).code == 0
    if {"mse", "entropy"} & {*record["node_methods"].values(), *record["methods"].values()}:
        assert "for 5 bits" in run("evaluate", *five, 4).error(2)


def test_one_picture_and_pictures_that_are_all_alike(run, float_flags, card_of, tmp_path):
    flags = [*float_flags, "--policy", "qdq", "--output", tmp_path]
    done = run("calibrate", *flags, "--pictures", 1)
    assert done.code == 0 and "advice: 1 picture is too few" in done.err and "--pictures" in done.err, done
    assert "sample" in kinds(card_of(tmp_path / FILE))
    black = tmp_path / "black"
    for number in range(4):
        file = black / "train" / "cat" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (9, 9, 9)).save(file)
    done = run("calibrate", *flags, "--pictures", 4, "--data-path", black)
    assert done.code == 0 and "the pictures are all alike" in done.err, done
    assert "alike" in kinds(card_of(tmp_path / FILE))
    assert "must be at least 1" in run("calibrate", *flags, "--pictures", 0).error(2)
