"""Pictures for `calibrate` and `evaluate`: which are sampled, archives, tables, shards, odd and broken ones."""

import pytest


@pytest.fixture
def flags(micro):
    return ["--cfg", micro / "swin.yaml", "--device", "cpu", "--batch", 4]


@pytest.mark.slow
def test_the_sample_is_seeded_and_batches_only_cut_it(calibrate):
    def ranges(*flags):
        state, card = calibrate(*flags)
        return {key: value.item() for key, value in state.items() if key.endswith("_amax")}, card["calibration"]

    base, record = ranges()
    assert (base, record) == ranges()
    again, cut = ranges("--pictures", 8, "--batch", 1)
    assert again == base and cut["files"] == record["files"]
    other, reseeded = ranges("--seed", 1)
    assert other != base and set(reseeded["files"]) != set(record["files"]) and reseeded["seed"] == 1


def test_broken_pictures_are_counted_and_named(run, float_flags, card_of, own_pictures, tmp_path):
    for split in ("train", "val"):
        (own_pictures / split / "cat" / "nothing.png").write_bytes(b"")
    flags = ["--data-path", own_pictures, "--max-unreadable", 0.2]
    done = run("calibrate", *float_flags, *flags, "--pictures", 12, "--output", tmp_path / "out").ok()
    calibrated = tmp_path / "out" / "swin_micro_calib.pth"
    record = card_of(calibrated)["calibration"]
    assert len(set(record["files"])) == 12 and record["unreadable"] == ["cat/nothing.png"]
    assert "1 of 13 pictures are unreadable: cat/" in done.err
    assert "1 of 8 pictures are unreadable: cat/" in run("evaluate", calibrated, *flags).ok().err
    for result in card_of(calibrated)["results"]:
        assert result["pictures"] == 7 and result["unreadable"] == 1 and "cat/nothing.png" in result["note"]
    assert "unreadable" in run("report", calibrated.with_suffix(".json")).out


@pytest.mark.parametrize("split", ["train", "val"])
def test_too_many_broken_pictures_are_one_error(run, float_flags, calibrated, own_pictures, tmp_path, split):
    for file in sorted((own_pictures / split).rglob("*.png"))[:2]:
        file.write_bytes(b"")
    flags = ["--data-path", own_pictures, "--quiet", "--output", tmp_path / "out"]
    calibrating = ["calibrate", *float_flags, "--pictures", 12]
    line = run(*(calibrating if split == "train" else ["evaluate", calibrated]), *flags).error(1)
    total = {"train": 12, "val": 7}[split]
    assert f"of {total} pictures are unreadable: cat/" in line and "--max-unreadable (now 0.01)" in line
    assert not list((tmp_path / "out").glob("*"))
