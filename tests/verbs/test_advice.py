"""Advice as a user meets it: on the screen and in the run card."""

from PIL import Image

FILE = "swin_micro_calib.pth"


def kinds(card):
    return [one["kind"] for one in card["calibration"]["advice"]]


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
