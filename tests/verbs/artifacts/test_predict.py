"""`predict`: classes from a checkpoint or an artifact, unreadable pictures."""

import json

import numpy as np
import onnx
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
    about = [answer[key] for key in ("schema", "engine", "model")]
    assert about == ["swin-quant/predictions/1", "onnxruntime", "means.onnx"]
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
    assert done.code == 0 and "gone.jpg: no such picture" in done.err and "broken.png" in done.err
    answer = json.loads((tmp_path / "a.json").read_text())
    assert [one["picture"] for one in answer["pictures"]] == [str(file) for file in good]
    assert set(answer["unreadable"]) == {str(folder / "broken.png"), str(tmp_path / "gone.jpg")}
    line = run("predict", hand_made, folder / "broken.png").error(1)
    assert "broken.png: " in line and "of 1 pictures" not in line
    assert "gone.jpg: no such picture" in run("predict", hand_made, tmp_path / "gone.jpg").error(1)


def test_flags_that_do_not_fit(run, exports, hand_made, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.txt").write_text("a\nb\n")
    places = {"hand": hand_made, "checkpoint": exports.checkpoint, "all": pictures, "two": "two.txt"}
    for flags, message in (
        ("{hand} {all} --top 0", "--top 0: must be at least 1"),
        ("{hand} {all} --policy qdq", "--policy is not for artifacts"),
        ("{hand} {all} --labels {two}", "has 2 names, the model 3 classes"),
        ("{checkpoint} {all} --engine openvino", "--engine is not for checkpoints"),
        ("{checkpoint} {all} --threads 2", "--threads is not for checkpoints"),
        ("{hand} nothing*.png", "nothing*.png: no picture there"),
        ("{hand} {all} --data-path x", "both name the pictures"),
        ("{hand}", "no pictures: give"),
    ):
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


def test_a_file_that_is_not_one_of_names(tmp_path):
    for content, says in (
        (None, "labels.txt: the list of class names cannot be read"),
        (b"\xff\xfe\x00", "labels.txt: is no list of class names: it is not UTF-8 text"),
        (b"only", "labels.txt: has 1 names, the model 2 classes"),
    ):
        if content is not None:
            (tmp_path / "labels.txt").write_bytes(content)
        with pytest.raises(SwinQuantError, match=says):
            class_names(2, str(tmp_path / "labels.txt"))
