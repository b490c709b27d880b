"""swin-quant predict --output: Parquet files, equal from one process and from two, continued, and never mixed with
others'."""

import json

import pyarrow.parquet as parquet
import pytest


@pytest.fixture
def many(own_pictures):
    """A folder of 7 pictures; the third and the fourth, which fill a shard, cannot be read."""
    files = sorted((own_pictures / "val").rglob("*.png"))
    for file in files[2:4]:
        file.write_bytes(b"no picture")
    return own_pictures / "val"


def read(folder):
    manifest = json.loads((folder / "predictions.json").read_text())
    tables = [parquet.read_table(folder / name).to_pylist() for name in manifest["files"]]
    return manifest, tables


def test_rows_are_the_answers_of_predict_in_the_order_of_the_pictures(run, hand_made, many, tmp_path):
    done = run("predict", hand_made, many, "--output", tmp_path / "out", "--shard", 2).ok()
    assert done.out.strip() == str(tmp_path / "out" / "predictions.json")
    manifest, tables = read(tmp_path / "out")
    assert [len(table) for table in tables] == [2, 2, 2, 1] and manifest["unreadable"] == 2
    plain = json.loads(run("predict", hand_made, many, "--json", "-").out)
    rows = [row for table in tables for row in table]
    expected = {one["picture"]: one["classes"] for one in plain["pictures"]}
    assert [row["picture"] for row in rows] == sorted(map(str, many.rglob("*.png")))
    for row in rows:
        assert [guess["index"] for guess in row["classes"]] == [
            guess["index"] for guess in expected.get(row["picture"], [])
        ]
        assert (row["unreadable"] is None) == (row["picture"] in expected)
    first = rows[0]["classes"][0]
    assert first["probability"] == pytest.approx(expected[rows[0]["picture"]][0]["probability"], rel=1e-5)


@pytest.mark.slow
def test_two_ranks_write_what_one_does(run, forked, hand_made, many, tmp_path):
    words = ["predict", hand_made, many, "--shard", 2, "--threads", 1, "--device", "cpu"]
    assert run(*words, "--output", tmp_path / "one").code == 0
    ends = forked(2, *words, "--output", tmp_path / "two")
    assert [done.code for done in ends] == [0, 0], ends
    assert ends[1].out == "" and read(tmp_path / "one") == read(tmp_path / "two")


def test_an_interrupted_prediction_resumes(run, hand_made, many, tmp_path):
    words = ["predict", hand_made, many, "--shard", 2, "--output", tmp_path]
    assert run(*words).code == 0
    whole = read(tmp_path)
    (tmp_path / "predictions-00002-of-00004.parquet").unlink()
    kept = (tmp_path / "predictions-00000-of-00004.parquet").stat().st_mtime_ns
    done = run(*words)
    assert done.code == 0 and "3 of 4 shards are there already" in done.err
    assert read(tmp_path) == whole
    assert (tmp_path / "predictions-00000-of-00004.parquet").stat().st_mtime_ns == kept


@pytest.mark.parametrize("what", ["other options", "no Parquet"])
def test_shards_of_something_else_are_not_touched(run, hand_made, many, tmp_path, what):
    words = ["predict", hand_made, many, "--shard", 4, "--output", tmp_path]
    assert run(*words).code == 0
    place = tmp_path / "predictions-00001-of-00002.parquet"
    if what == "no Parquet":
        place.write_bytes(b"notes")
    before = place.read_bytes()
    message = run(*words, *(["--top", 1] if what == "other options" else [])).error(2)
    assert "is not of this model, these pictures and options" in message and place.read_bytes() == before
