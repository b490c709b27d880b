"""swin-quant evaluate --answers: each engine's answer to each picture, and runs that can be continued."""

import json

import numpy as np
import pytest

from swin_quant.score.saved_predictions import unique_names

parquet = pytest.importorskip("pyarrow.parquet")
FACTS = b"swin_quant.facts"


@pytest.fixture
def broken(own_pictures):
    """7 pictures with labels; the third and the fourth, which fill a shard, cannot be read."""
    for file in sorted((own_pictures / "val").rglob("*.png"))[2:4]:
        file.write_bytes(b"no picture")
    return own_pictures


def read(folder):
    manifest = json.loads((folder / "answers.json").read_text())
    return manifest, [row for name in manifest["files"] for row in parquet.read_table(folder / name).to_pylist()]


def scored(done, file):
    """The results in the card beside `file`, without their times."""
    assert done.code == 0, done
    results = json.loads(file.with_suffix(".json").read_text())["results"]
    return [{key: value for key, value in one.items() if key != "ms_per_picture"} for one in results]


@pytest.fixture
def words(hand_made, broken):
    return ["evaluate", hand_made, "--engine", "onnxruntime", "--data-path", broken, "--max-unreadable", 1, "--batch",
            2, "--threads", 1, "--device", "cpu", "--json"]  # fmt: skip


def test_answers_are_those_of_the_engine_and_scores_as_without_them(run, words, broken, tmp_path, arithmetic):
    file = words[1]
    plain = scored(run(*words), file)
    assert scored(run(*words, "--answers", tmp_path / "out", "--shard", 2), file) == plain
    manifest, rows = read(tmp_path / "out")
    files = sorted((broken / "val").rglob("*.png"))
    assert len(manifest["files"]) == 4 and manifest["unreadable"] == 2
    assert [row["picture"].split("/")[-1] for row in rows] == [file.name for file in files]
    assert [row["label"] for row in rows] == [sorted({f.parent for f in files}).index(file.parent) for file in files]
    (column,) = set(rows[0]) - {"picture", "label", "unreadable"}
    right = 0
    for row, file in zip(rows, files, strict=True):
        if file in files[2:4]:
            assert row[column] is None and file.name in row["unreadable"]
            continue
        shares = np.exp(arithmetic(file)) / np.exp(arithmetic(file)).sum()
        assert [one["index"] for one in row[column]] == np.argsort(-shares).tolist()
        np.testing.assert_allclose([one["probability"] for one in row[column]], np.sort(shares)[::-1], atol=1e-5)
        right += row[column][0]["index"] == row["label"]
    assert plain[-1]["acc1"] == pytest.approx(100 * right / 5)


def test_files_of_one_name_are_told_apart_by_their_order():
    assert unique_names(["float32", "/a/x.onnx on openvino", "/b/x.onnx on openvino", "b/y.onnx on openvino"]) == {
        "float32": "float32", "/a/x.onnx on openvino": "x.onnx on openvino",
        "/b/x.onnx on openvino": "x.onnx on openvino (2)", "b/y.onnx on openvino": "y.onnx on openvino",
    }  # fmt: skip


def test_facts_that_cannot_be_are_refused(run, words, tmp_path):
    """Also in a shard that names this run."""
    words = [*words, "--answers", tmp_path, "--shard", 2]
    run(*words)
    file = tmp_path / "answers-00000-of-00004.parquet"
    table = parquet.read_table(file)
    metadata = table.schema.metadata
    for sums in ({}, None, {"x": [1.0]}, {key: [-1.0] * 11 for key in json.loads(metadata[FACTS])["sums"]}):
        told = metadata | {FACTS: json.dumps({"sums": sums, "unreadable": []}).encode()}
        parquet.write_table(table.replace_schema_metadata(told), file)
        done = run(*words)
        assert done.code == 1 and file.name in done.err and "bug" not in done.err


def test_two_ranks_give_what_one_does(run, forked, words, tmp_path):
    one = scored(run(*words, "--answers", tmp_path / "one", "--shard", 2), words[1])
    ends = forked(2, *words, "--answers", tmp_path / "two", "--shard", 2)
    assert ends[1].code == 0 and ends[1].out == ""
    assert scored(ends[0], words[1]) == one and read(tmp_path / "two") == read(tmp_path / "one")


def test_what_was_cut_off_goes_on_where_it_was(run, words, tmp_path):
    """Scores include the files that existed; only the missing one is computed."""
    words = [*words, "--answers", tmp_path, "--shard", 2]
    whole, kept = scored(run(*words), words[1]), tmp_path / "answers-00000-of-00004.parquet"
    before = kept.stat().st_mtime_ns
    (tmp_path / "answers-00003-of-00004.parquet").unlink()
    done = run(*words)
    assert "3 of 4 shards are there already" in done.err and scored(done, words[1]) == whole
    assert kept.stat().st_mtime_ns == before
    done = run(*words, "--batch", 3)
    assert done.code == 2 and "is not of this model, these pictures and options" in done.err
    kept.write_bytes(b"notes")
    done = run(*words)
    assert done.code == 2 and "answers-00000-of-00004.parquet: is not of this" in done.err
    assert kept.read_bytes() == b"notes"


def test_every_engine_of_a_checkpoint_has_a_column(run, exports, own_pictures, tmp_path):
    words = ["evaluate", exports.checkpoint, "--data-path", own_pictures, "--policy", "ft-mode1", "ft-mode2", "--json"]
    done = run(*words, "--answers", tmp_path / "out")
    manifest, rows = read(tmp_path / "out")
    columns = list(manifest["engines"])
    assert columns == list(rows[0])[3:] and len(columns) == 4 and len(rows) == 7
    results = {(one["precision"], one["policy"]): one for one in scored(done, exports.checkpoint)}
    for column, (_, precision, policy, *_) in manifest["engines"].items():
        result = results[precision, policy]
        right = sum(row[column][0]["index"] == row["label"] for row in rows)
        assert result["acc1"] == pytest.approx(100 * right / 7), column
        same = sum(row[column][0]["index"] == row["float32"][0]["index"] for row in rows)
        assert result["agreement"] in (None, pytest.approx(100 * same / 7))


def test_flags_that_do_not_fit(run, words, tmp_path):
    assert "--shard: is for --answers" in run(*words, "--shard", 2).error(2)
    assert "--shard 0: must be at least 1" in run(*words, "--answers", tmp_path / "x", "--shard", 0).error(2)
