"""Class names through whole commands: a head in another order with its `id2label` beside it scores like the
original."""

import itertools
import json
import shutil

import pytest
import torch

import swin_quant as sq
from swin_quant.checkpoint import read_state_dict

PETS = ["cat", "dog", "fox"]
ORDER = [2, 0, 1]  # the classes of the permuted head's rows
NAMES = [PETS[place] for place in ORDER]
GUESSING = "guessing among 3 classes does as well"


@pytest.fixture
def permuted(micro, tmp_path):
    """A snapshot of the micro model with the rows of its head in ORDER, and the names in that order beside it."""
    state = read_state_dict(micro / "swin.pth")[0]
    folder = tmp_path / "permuted"
    folder.mkdir()
    heads = {key: value[ORDER] for key, value in state.items() if key.startswith("head.")}
    torch.save(state | heads, folder / "pytorch_model.bin")
    config = {"model_type": "swin", "image_size": 32, "window_size": 4, "id2label": dict(enumerate(NAMES))}
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "pytorch_model.bin"


@pytest.fixture
def scored(run, scoring_flags, tmp_path):
    """scored(checkpoint, flags) -> pictures, accuracy and loss of its results on val."""

    def results(checkpoint, *flags):
        output = tmp_path / f"scored{next(numbers)}"
        run("evaluate", checkpoint, *scoring_flags, *flags, "--output", output).ok()
        (card,) = (json.loads(file.read_text()) for file in output.glob("*_eval.json"))
        return [(result["pictures"], result["acc1"], round(result["loss"], 4)) for result in card["results"]]

    numbers = itertools.count()
    return results


def test_a_head_in_another_order_is_scored_by_its_names(scored, permuted, micro, own_pictures):
    assert scored(permuted) == scored(micro / "swin.pth")
    shutil.rmtree(own_pictures / "val" / "dog")
    there = ["--data-path", own_pictures]
    assert scored(permuted, *there) == scored(micro / "swin.pth", *there)
    (own_pictures / "val" / "fox").rename(own_pictures / "val" / "FOX")
    assert scored(permuted, *there) == scored(micro / "swin.pth", *there)


def test_other_names_are_refused_before_work(run, permuted, micro, float_flags, scoring_flags, own_pictures, tmp_path):
    (own_pictures / "val" / "fox").rename(own_pictures / "val" / "wolf")
    flags = ["--data-path", own_pictures, "--output", tmp_path / "out"]
    done = run("evaluate", permuted, *scoring_flags, *flags)
    assert done.code == 1 and "wolf there alone, fox in " in done.err.splitlines()[-1]
    assert not list((tmp_path / "out").glob("*.pth"))


@pytest.mark.nightly
def test_names_go_all_the_way(run, permuted, pictures, float_flags, scoring_flags, card_of, scored, tmp_path):
    """Calibrated, trained, exported and asked, a model always has the names of its head, in its order."""
    flags, out = ["--data-path", pictures, "--device", "cpu"], tmp_path / "out"
    calibration = ["--cfg", float_flags[1], "--pictures", 8, "--batch", 4, "--policy", "qdq", "--output", out]
    assert run("calibrate", permuted, *flags, *calibration).code == 0
    calibrated = out / "swin_micro_calib.pth"
    training = ["--epochs", 1, "--batch", 4, "--set", "augment.crop=padded", "--no-eval", "--output", out]
    assert run("finetune", calibrated, *flags, *training).code == 0
    assert run("export", calibrated, "--for", "onnxruntime", "--output", out).code == 0
    (exported,) = out.glob("*.onnx")
    for file in (calibrated, out / "swin_micro_qat.pth", exported):
        assert card_of(file)["class_names"] == NAMES
    picture = next(pictures.glob("val/*/*.png"))
    for file in (permuted, calibrated, exported):
        done = run("predict", file, picture, "--json", "-", *(["--cfg", float_flags[1]] if file == permuted else []))
        assert {guess["index"]: guess["name"] for guess in json.loads(done.out)["pictures"][0]["classes"]} == dict(
            enumerate(NAMES)
        )
    run("evaluate", exported, "--data-path", pictures, "--half", "none").ok()
    in_float = [result for result in card_of(exported)["results"] if result["engine"] == "torch"]
    assert [(result["pictures"], result["acc1"], round(result["loss"], 4)) for result in in_float] == scored(permuted)
    model = sq.load(calibrated)
    assert model.class_names == NAMES
    in_python = sq.evaluate(model, sq.pictures(pictures, "val"), half="none").float32
    assert [(in_python.pictures, in_python.acc1)] == [result[:2] for result in scored(permuted)]


def test_without_names_they_are_the_training_folders(calibrated, card_of):
    assert card_of(calibrated)["class_names"] == PETS


@pytest.mark.nightly
def test_a_model_at_chance_accuracy_is_warned_about(run, micro, pictures, float_flags, scoring_flags, tmp_path):
    """Every picture lies in the folder of a class that the model does not predict."""
    model, data = sq.load(micro / "swin.pth", micro / "swin.yaml"), tmp_path / "wrong"
    for split in ("train", "val"):
        for name in PETS:
            (data / split / name).mkdir(parents=True)
        for name, (best, *_) in sq.predict(model, [pictures]).items():
            file = data / split / PETS[(best.index + 1) % 3] / name.replace("/", "_")
            shutil.copyfile(f"/{name}" if not name.startswith("/") else name, file)
    flags = ["--data-path", data, "--output", tmp_path / "out"]
    assert GUESSING in run("evaluate", micro / "swin.pth", *scoring_flags, *flags).err
    assert run("calibrate", *float_flags, *flags, "--policy", "qdq").code == 0
    training = ["--epochs", 1, "--batch", 4, "--set", "augment.crop=padded", "--no-eval"]
    told = run("finetune", tmp_path / "out" / "swin_micro_calib.pth", *scoring_flags, *flags, *training).err
    assert GUESSING in told and told.index(GUESSING) < told.index("epochs: 1, each of")
