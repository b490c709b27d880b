"""Pictures for `calibrate` and `evaluate`: which are sampled, archives, tables, shards, odd and broken ones."""

import io
import re
import tarfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import swin_quant as sq
from swin_quant.base.errors import SwinQuantError


@pytest.fixture
def flags(micro):
    return ["--cfg", micro / "swin.yaml", "--device", "cpu", "--batch", 4]


def test_one_table_calibrates_but_is_not_scored_on_the_same_pictures(run, micro, flags, pictures, tmp_path):
    names = ("cat", "dog", "fox")
    rows = [f"{file},{names.index(file.parent.name)}\n" for file in sorted((pictures / "train").rglob("*.png"))]
    (tmp_path / "mine.csv").write_text("".join(rows))
    data = ("--data-path", f"csv:{tmp_path}/mine.csv")
    words = (micro / "swin.pth", *flags, *data, "--pictures", 8, "--policy", "qdq", "--output", tmp_path / "out")
    done = run("calibrate", *words)
    assert done.code == 0, done
    (checkpoint,) = (tmp_path / "out").glob("*_calib.pth")
    assert run("evaluate", checkpoint, *flags[2:], *data).code == 0  # unless asked for


def test_shards_are_scored_as_their_folder_is(run, micro, flags, pictures, tmp_path):
    with tarfile.open(tmp_path / "val-0000.tar", "w") as archive:
        for number, file in enumerate(sorted((pictures / "val").rglob("*.png"))):
            label = str(("cat", "dog", "fox").index(file.parent.name)).encode()
            for name, data in ((f"{number}.png", file.read_bytes()), (f"{number}.cls", label)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    tables = []
    for number, place in enumerate((pictures, tmp_path, f"wds:{tmp_path}/{{split}}-{{0000..0000}}.tar")):
        words = ["--data-path", place, "--output", tmp_path / str(number), "--quiet", "--json"]
        done = run("evaluate", micro / "swin.pth", *flags, *words).ok()
        tables.append(re.findall(r'"(?:acc1|acc5|loss)": ([0-9.]+)', done.out))
    assert len(tables[0]) >= 2 and tables[0] == tables[1] == tables[2]
    broken = run("evaluate", micro / "swin.pth", *flags, "--data-path", f"wds:{tmp_path}/{{a,b}}.tar")
    assert "a.tar: no such shard" in broken.error(1)


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


def encoded(image, form, **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def odd_pictures():
    noise = np.random.default_rng(3).integers(0, 256, (32, 32), dtype=np.uint8)
    grey = Image.fromarray(noise)
    return {
        "cmyk.jpg": encoded(grey.convert("CMYK"), "JPEG"),
        "grey.png": encoded(grey, "PNG"),
        "deep.png": encoded(Image.fromarray(noise.astype(np.uint16) * 257), "PNG"),
        "moving.gif": encoded(grey.convert("P"), "GIF", save_all=True, append_images=[grey.convert("P")]),
    }


def test_odd_pictures_are_used_and_broken_ones_are_counted_and_named(run, float_flags, card_of, own_pictures, tmp_path):
    whole = odd_pictures()
    broken = {"cut.jpg": encoded(Image.new("RGB", (64, 64), "red"), "JPEG")[:400], "nothing.png": b""}
    for split in ("train", "val"):
        for name, data in (whole | broken).items():
            (own_pictures / split / "cat" / name).write_bytes(data)
    flags = ["--data-path", own_pictures, "--max-unreadable", 0.2, "--pictures", 16, "--policy", "ft-mode1"]
    done = run("calibrate", *float_flags, *flags, "--output", tmp_path / "out").ok()
    card = card_of(tmp_path / "out" / "swin_micro_calib.pth")
    files = set(card["calibration"]["files"])  # all 16 readable pictures of 18
    assert len(files) == 16 and {f"cat/{name}" for name in whole} < files
    assert card["calibration"]["unreadable"] == ["cat/cut.jpg", "cat/nothing.png"]
    assert "2 of 18 pictures are unreadable: cat/" in done.err
    words = ["--data-path", own_pictures, "--max-unreadable", 0.2]
    done = run("evaluate", tmp_path / "out" / "swin_micro_calib.pth", *words).ok()
    for result in card_of(tmp_path / "out" / "swin_micro_calib.pth")["results"]:
        assert result["pictures"] == 7 + 4 and result["unreadable"] == 2
        assert "cat/cut.jpg, cat/nothing.png" in result["note"]
    assert "2 of 13 pictures are unreadable: cat/" in done.err
    assert "unreadable" in run("report", tmp_path / "out" / "swin_micro_calib.json").out


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


def test_python_keeps_the_limit_of_broken_pictures(model, own_pictures):
    """Also more broken pictures than the command's default allows."""
    broken = sorted((own_pictures / "train").rglob("*.png"))[0]
    broken.write_bytes(b"")
    some = sq.pictures(own_pictures)
    with pytest.raises(SwinQuantError, match="1 of 12 pictures are unreadable"):
        sq.calibrate(model, some)
    record = sq.calibrate(model, replace(some, max_unreadable=0.2)).card.calibration
    assert record["unreadable"] == [f"{broken.parent.name}/{broken.name}"]
