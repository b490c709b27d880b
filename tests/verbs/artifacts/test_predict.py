"""`predict`: classes from a checkpoint or an artifact, unreadable pictures, and Parquet files that are continued."""

import json

import numpy as np
import onnx
import pyarrow.parquet as parquet
import pytest

from swin_quant.backends.artifact import finish_artifact
from swin_quant.base.errors import SwinQuantError
from swin_quant.cards.card import RunCard
from swin_quant.score.scoring import class_names


@pytest.fixture
def predict(run):
    """predict(words ...) -> the JSON on standard output."""

    def go(*words):
        done = run("predict", *words, "--json", "-").ok()
        return json.loads(done.out)

    return go


def probabilities(answer):
    return [[guess["probability"] for guess in sorted(one["classes"], key=lambda g: g["index"])]
            for one in answer["pictures"]]  # fmt: skip


def test_probabilities_against_arithmetic(predict, hand_made, pictures, arithmetic, tmp_path):
    labels = tmp_path / "names.txt"
    labels.write_text("cat\ndog\nfox\n")
    files = sorted((pictures / "val").rglob("*.png"))
    answer = predict(hand_made, *files, "--labels", labels)
    assert (
        answer["schema"] == "swin-quant/predictions/1"
        and answer["engine"] == "onnxruntime"
        and answer["model"] == "means.onnx"
    )
    assert [one["picture"] for one in answer["pictures"]] == [str(file) for file in files]
    expected = [np.exp(logits) / np.exp(logits).sum() for logits in map(arithmetic, files)]
    np.testing.assert_allclose(probabilities(answer), expected, atol=1e-5)
    for one, row in zip(answer["pictures"], expected, strict=True):
        assert [guess["index"] for guess in one["classes"]] == np.argsort(-row).tolist()  # best first
        assert [guess["name"] for guess in one["classes"]] == [("cat", "dog", "fox")[i] for i in np.argsort(-row)]


def test_a_calibrated_checkpoint_runs_quantized_as_its_card_says_and_like_its_export(predict, exports, pictures):
    answer = predict(exports.checkpoint, pictures / "val")
    assert (answer["engine"], answer["precision"], answer["policy"]) == ("torch fake-quant", "int8", "ft-mode1")
    emulated = predict(exports.ft, pictures / "val")
    assert emulated["engine"] == "FasterTransformer (emulated)"
    np.testing.assert_allclose(probabilities(answer), probabilities(emulated), atol=0.05)
    float_model = predict(exports.checkpoint, pictures / "val", "--policy", "float")
    assert float_model["precision"] == "float32"
    assert probabilities(answer) != probabilities(float_model)


def test_names_that_the_onnx_file_carries(run, predict, exports, hand_made, pictures):
    one = next((pictures / "val").rglob("*.png"))
    (answer,) = predict(exports.onnx, one)["pictures"]
    assert {guess["name"] for guess in answer["classes"]} == {"cat", "dog", "fox"}, "the folders that calibrated it"
    model = onnx.load(hand_made)
    model.metadata_props[0].value = json.dumps(["Katze", "Hund", "Fuchs"])
    onnx.save(model, hand_made)
    finish_artifact(hand_made, RunCard.read(hand_made.with_suffix(".json")), "onnx", "float32", {})
    done = run("predict", hand_made, one)
    assert "Katze" in done.out and "means.onnx: float32 on onnxruntime" in done.out


def test_broken_pictures_are_named_and_skipped(run, hand_made, own_pictures, tmp_path):
    folder = own_pictures / "val" / "cat"
    (folder / "broken.png").write_bytes(b"\x89PNG broken")
    good = sorted(file for file in folder.glob("*.png") if file.stem != "broken")
    done = run("predict", hand_made, folder, tmp_path / "gone.jpg", "--json", tmp_path / "a.json")
    assert done.code == 0 and "gone.jpg: No such file" in done.err and "broken.png" in done.err
    answer = json.loads((tmp_path / "a.json").read_text())
    assert [one["picture"] for one in answer["pictures"]] == [str(file) for file in good]
    assert set(answer["unreadable"]) == {str(folder / "broken.png"), str(tmp_path / "gone.jpg")}
    line = run("predict", hand_made, folder / "broken.png").error(1)
    assert "broken.png: " in line and "of 1 pictures" not in line
    assert "gone.jpg: No such file" in run("predict", hand_made, tmp_path / "gone.jpg").error(1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("{hand} {all} --top 0", "--top 0: must be at least 1"),
        ("{hand} {all} --policy qdq", "--policy is not for artifacts"),
        ("{hand} {all} --labels {two}", "has 2 names, the model 3 classes"),
        ("{checkpoint} {all} --engine openvino", "--engine is not for checkpoints"),
        ("{checkpoint} {all} --threads 2", "--threads is not for checkpoints"),
        ("{hand} nothing*.png", "nothing*.png: no picture there"),
        ("{hand} {all} --shard 2", "--shard: is for --output"),
        ("{hand} {all} --output x --shard 0", "--shard 0: must be at least 1"),
        ("{hand} {all} --data-path x", "both name the pictures"),
        ("{hand}", "no pictures: give"),
        ("{hand} --logits out", "no pictures: give"),
    ],
)
def test_flags_that_do_not_fit(run, exports, hand_made, pictures, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.txt").write_text("a\nb\n")
    places = {"hand": hand_made, "checkpoint": exports.checkpoint, "all": pictures, "two": "two.txt"}
    assert message in run("predict", *flags.format(**places).split()).error(2)


def test_a_checkpoint_whose_card_is_of_another_size(run, exports, card_of, with_card, pictures):
    file = with_card(exports.checkpoint, preprocess=card_of(exports.checkpoint)["preprocess"] | {"size": 64})
    line = run("predict", file, pictures).error(1)
    assert "its run card resizes pictures to 64, the model takes 32" in line


def test_a_model_that_is_no_classifier(run, exports, card_of, with_card, pictures):
    config = card_of(exports.onnx)["config"]
    config["MODEL"]["OUTPUT_KIND"] = "features"
    said = "predict is about logits, and this model gives output maps"
    assert said in run("predict", with_card(exports.onnx, config=config), pictures).error(2)


def test_names_come_from_a_file_then_from_the_artifact_then_from_imagenet(tmp_path):
    path = tmp_path / "labels.txt"
    path.write_bytes("\ufeffKatze\r\nHündin\r\n\r\n".encode())
    assert class_names(2, str(path), ["a", "b"]) == ["Katze", "Hündin"]
    assert class_names(2, None, ["a", "b"]) == ["a", "b"] and class_names(3) == ["0", "1", "2"]
    names = class_names(1000, None, ["a", "b"])
    assert names[0].startswith("tench") and "tiger cat" in names[282] and len(names) == 1000
    assert len(class_names(21841)) == 21841


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe\x00", "labels.txt: is no list of class names: it is not UTF-8 text"),
        (b"only", "labels.txt: has 1 names, the model 2 classes"),
        (None, "labels.txt: the list of class names cannot be read"),
    ],
)
def test_a_file_that_is_not_one_of_names(tmp_path, content, says):
    if content is not None:
        (tmp_path / "labels.txt").write_bytes(content)
    with pytest.raises(SwinQuantError, match=says):
        class_names(2, str(tmp_path / "labels.txt"))


@pytest.fixture
def logits(run, tmp_path):
    """logits(artifact and flags ...) -> the arrays that were written."""

    def go(*words):
        run("predict", *words, "--logits", tmp_path / "out").ok()
        (written,) = (tmp_path / "out").glob("*_logits.npz")
        return dict(np.load(written))  # allow_pickle is off

    return go


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_logits_against_arithmetic(logits, hand_made, pictures, arithmetic, engine):
    arrays = logits(hand_made, "--engine", engine, "--data-path", pictures, "--batch", 2)
    files = sorted((pictures / "val").rglob("*.png"))
    assert arrays["names"].tolist() == [file.relative_to(pictures / "val").as_posix() for file in files]
    assert arrays["logits"].dtype == np.float32 and arrays["logits"].shape == (7, 3)
    np.testing.assert_allclose(arrays["logits"], [arithmetic(file) for file in files], atol=1e-5)
    assert (arrays["top1"] == arrays["logits"].argmax(1)).all()
    assert arrays["labels"].tolist() == [("cat", "dog", "fox").index(file.parent.name) for file in files]


def test_one_engine_does_without_being_named(logits, hand_made, own_pictures):
    files = sorted(own_pictures.rglob("*.png"))
    files[1].write_bytes(b"broken")
    arrays = logits(hand_made, *files[:4], "--max-unreadable", 0.5)
    assert arrays["names"].tolist() == [str(file) for file in (files[0], *files[2:4])]
    assert arrays["labels"].tolist() == [-1, -1, -1]


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
