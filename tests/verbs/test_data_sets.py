"""Data sets other than folders, through whole commands."""

import io
import re
import tarfile

import pytest


@pytest.fixture
def flags(micro):
    return ["--cfg", micro / "swin.yaml", "--device", "cpu", "--half", "none", "--batch", 4]


def test_one_table_calibrates_but_is_not_scored_on_the_same_pictures(run, micro, flags, pictures, tmp_path):
    names = ("cat", "dog", "fox")
    rows = [f"{file},{names.index(file.parent.name)}\n" for file in sorted((pictures / "train").rglob("*.png"))]
    (tmp_path / "mine.csv").write_text("".join(rows))
    data = ("--data-path", f"csv:{tmp_path}/mine.csv")
    words = (micro / "swin.pth", *flags, *data, "--pictures", 8, "--policy", "qdq", "--output", tmp_path / "out")
    done = run("calibrate", *words)
    assert done.code == 0 and "has no val split" in done.err, done
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
        done = run("evaluate", micro / "swin.pth", *flags, *words)
        assert done.code == 0, done.err
        tables.append(re.findall(r'"(?:acc1|acc5|loss)": ([0-9.]+)', done.out))
    assert len(tables[0]) >= 2 and tables[0] == tables[1] == tables[2]
    broken = run("evaluate", micro / "swin.pth", *flags, "--data-path", f"wds:{tmp_path}/{{a,b}}.tar")
    assert "a.tar: no such shard" in broken.error(1)
