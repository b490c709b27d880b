"""Python functions and engines take pictures and models of every kind, and refuse anything else in a line."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import swin_quant as sq
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, UNPREPARED
from tests.verbs.test_wrap import Net

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
MEAN, STD = (torch.tensor(one)[:, None, None] for one in (IMAGENET_MEAN, IMAGENET_STD))
PREPARED = (torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255 - MEAN) / STD


@pytest.fixture
def files(tmp_path):
    for number, one in enumerate(PIXELS):
        Image.fromarray(one).save(tmp_path / f"{number}.png")
    return tmp_path


GIVEN = {
    "tensor": lambda files: PREPARED,
    "double": lambda files: PREPARED.double(),
    "array": lambda files: PREPARED.numpy(),
    "list of tensors": lambda files: list(PREPARED),
    "pixels": lambda files: PIXELS,
    "tensor of pixels": lambda files: torch.from_numpy(PIXELS),
    "list of pixels": lambda files: list(PIXELS),
    "PIL": lambda files: [Image.fromarray(one) for one in PIXELS],
    "paths": lambda files: [files / "0.png", str(files / "1.png")],
    "folder": lambda files: files,
    "mixed": lambda files: [files / "0.png", Image.fromarray(PIXELS[1])],
}


@pytest.fixture(scope="module")
def loaded(_exports):
    return {"artifact": sq.artifact(_exports.onnx).load("onnxruntime"), "model": sq.load(_exports.checkpoint)}


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("what", ["artifact", "model"])
def test_pictures_of_every_kind_are_one_input_and_it_says_which_it_took(loaded, what, kind, files):
    engine = loaded[what]
    found = engine(GIVEN[kind](files))
    torch.testing.assert_close(found, engine(PREPARED), rtol=1e-4, atol=1e-4)
    engine(GIVEN[kind](files))
    prepared = kind in ("tensor", "double", "array", "list of tensors")
    assert engine.took.startswith("tensors of float: taken as pre" if prepared else "pictures: preprocessed as the run")


def test_one_picture_of_any_size_is_a_batch_of_one(loaded, files):
    large = np.zeros((50, 70, 3), np.uint8)
    assert loaded["artifact"](large).shape == loaded["model"](str(files / "0.png")).shape == (1, 3)


def test_values_that_are_no_pictures_are_refused_in_one_line(loaded):
    for given, says in (
        ({}, "images are dict: give float"),
        (None, "images are NoneType: give float"),
        ([], "images are an empty list: give float"),
        ([PREPARED[0], PREPARED[1, :, :4]], r"a list of float32 \[3, 32, 32\] and float32 \[3, 4, 32\]: give float"),
        (np.array(["a"]), r"images are <U1 \[1\]: give float"),
        (PREPARED[0], r"images \[3, 32, 32\]: must be \[B, 3, H, W\]"),
        (PREPARED.long(), "are int64, not normalised"),
        ("nowhere.png", "nowhere.png: no such picture"),
    ):
        for engine in loaded.values():
            with pytest.raises(sq.SwinQuantError, match=says) as raised:
                engine(given)
            assert "\n" not in str(raised.value)


def test_pictures_need_preprocessing_that_somebody_said(files):
    with pytest.raises(sq.UsageError, match="is not known: give `preprocess` to `sq.wrap`"):
        sq.wrap(nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten(), nn.AdaptiveAvgPool1d(4)), 8)(files)


def test_commands_say_so_of_a_file_that_takes_no_pictures(files, tmp_path, run):
    model = sq.calibrate(sq.wrap(Net(), 8, name="mine"), [torch.randn(16, 3, 8, 8)], passes=[])
    made = sq.export(model, "onnxruntime", tmp_path)
    for words in (
        ["predict", made.file, files / "0.png"],
        ["serve", made.file, "--port", 0],
        ["package", made.file, "--output", tmp_path / "package"],
    ):
        assert f"mine_int8_onnxruntime.json: {UNPREPARED}" in run(*words).error(1)


def test_pictures_with_labels_need_no_tensors(exports, pictures):
    model = sq.load(exports.checkpoint)
    opened = sq.pictures(pictures, "val").open(3)
    held = [([opened.read(index)], [opened.labels[index]]) for index in range(len(opened))]
    found = sq.evaluate(model, held, half="none")
    assert found.quantized.acc1 == sq.evaluate(model, pictures, half="none").quantized.acc1


def test_every_other_model_is_one_line_with_the_call_that_is_meant(exports, pictures):
    state = {"head.weight": torch.zeros(3, 4)}
    engine = sq.artifact(exports.onnx).load()
    bare = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    data = sq.pictures(pictures, "val")
    for call, says in (
        (lambda: sq.load(bare), r"Sequential: is no file: .*sq.wrap\(module, SIZE\)"),
        (lambda: sq.load(state), "is no file: torch.save a state dict"),
        (lambda: sq.load(exports.checkpoint, nn.Linear), r"type: is no config: give a module, sq.load\(FILE, module\)"),
        (lambda: sq.load(exports.checkpoint, state), "dict: is no config: give a module"),
        (lambda: sq.load(exports.onnx), r"is an artifact: sq.artifact\(FILE\)"),
        (lambda: sq.artifact(exports.checkpoint), r"is the card of a checkpoint.* sq.load\(FILE\)"),
        (lambda: sq.calibrate(bare, data), r"Sequential: is no model: give .*sq.wrap\(module, SIZE\)"),
        (lambda: sq.evaluate(bare, data), "Sequential: is no model"),
        (lambda: sq.evaluate(state, data), "is no model: give"),
        (lambda: sq.evaluate(engine, data), r"is no model: give .*sq.artifact\(FILE\)"),
        (lambda: sq.evaluate(7, data), r"int: is no model: give sq.load\(CHECKPOINT\)"),
        (lambda: sq.evaluate(exports.onnx, data, "qdq"), "is not for artifacts: .* has its own: leave it out"),
        (lambda: sq.calibrate(exports.onnx, data), r"is an artifact, and this needs the model: give sq.load"),
        (lambda: sq.verify(exports.checkpoint, data), "is a model, and `verify` compares an artifact"),
        (lambda: sq.predict(exports.checkpoint, torch.zeros(1, 3, 32, 32)), "with tensors call the model"),
        (lambda: sq.calibrate(exports.checkpoint, PREPARED), r"pictures are Tensor: give a folder"),
    ):
        with pytest.raises(sq.SwinQuantError, match=says) as raised:
            call()
        assert "\n" not in str(raised.value)


def test_labels_that_do_not_fit_are_one_line(exports):
    model = sq.load(exports.checkpoint)
    for labels, says in (
        (["cat", "dog"], r"labels are str \('cat'\): give numbers, as model.class_names.index\(NAME\)"),
        (torch.tensor([0, 1]) / 3 + 1, "labels hold 1.33333: give whole numbers"),
        ([0, 3], "labels are from 0 to 3, but the model has 3 classes, 0 to 2"),
        ([-1, 0], "labels are from -1 to 0, but the model has 3 classes"),
    ):
        with pytest.raises(sq.UsageError, match=says):
            sq.evaluate(model, [(PREPARED, labels)], half="none")


def test_predictions_are_of_pictures_of_any_kind(exports, pictures):
    model = sq.load(exports.checkpoint)
    one = Image.open(next((pictures / "val").rglob("*.png")))
    (found,) = sq.predict(model, one).values()
    both = sq.predict(exports.checkpoint, [one, np.asarray(one.convert("RGB"))])
    due = {guess.name: guess.probability for guess in found}
    for other in both.values():
        assert {guess.name: guess.probability for guess in other} == pytest.approx(due)
    assert "picture 1" in both and "cat" in str(both) and "<table>" in both._repr_html_()
    assert len(sq.predict(model, sq.pictures(pictures, "val", 3))) == 3


def test_the_artifact_of_a_wrapped_module_is_scored_and_verified_beside_the_module(tmp_path, run):
    torch.manual_seed(1)
    module = Net()
    module(torch.randn(32, 3, 8, 8))
    x = torch.randn(16, 3, 8, 8)
    with torch.no_grad():
        labels = module.eval()(x).argmax(1)
    how = sq.Preprocess(8, False, "bilinear", (0.5,) * 3, (0.5,) * 3)
    model = sq.calibrate(sq.wrap(module, 8, name="mine", preprocess=how, class_names=list("abcd")), [x], passes=[])
    made = sq.export(model, "onnxruntime", tmp_path)
    again = sq.artifact(made.file, Net())
    for exported in (made, again):
        found = sq.evaluate(exported, [(x, labels)], half="none")
        assert found.float32.acc1 == 100 and found.quantized.engine == "onnxruntime"
        assert sq.verify(exported, [x])
    alone = sq.evaluate(made.file, [(x, labels)], half="none")
    assert alone.float32 is None and alone.quantized.acc1 == found.quantized.acc1
    assert alone.verdict.delta_acc1 == found.quantized.delta_acc1, (
        "against the float of the same pictures, from the card"
    )
    with pytest.raises(sq.UsageError, match=r"wrapped module, which only Python builds: sq.artifact\(FILE, module\)"):
        sq.verify(made.file, [x])
    (guesses,) = sq.predict(made.file, PIXELS[0]).values()
    assert {guess.name for guess in guesses} == set("abcd")
    sq.calibrate(model, [x * 2], passes=[])
    with pytest.raises(sq.UsageError, match="mine was changed since it was exported"):
        sq.verify(made, [x])
