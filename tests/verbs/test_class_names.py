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


@pytest.mark.nightly
def test_names_go_all_the_way(run, permuted, pictures, float_flags, card_of, tmp_path):
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
        guesses = json.loads(done.out)["pictures"][0]["classes"]
        assert {guess["index"]: guess["name"] for guess in guesses} == dict(enumerate(NAMES))
    assert sq.load(calibrated).class_names == NAMES


def test_without_names_they_are_the_training_folders(calibrated, card_of):
    assert card_of(calibrated)["class_names"] == PETS


def test_a_model_at_chance_accuracy_is_warned_about(run, micro, pictures, scoring_flags, tmp_path):
    """Every picture lies in the folder of a class that the model does not predict."""
    model, data = sq.load(micro / "swin.pth", micro / "swin.yaml"), tmp_path / "wrong"
    for name in PETS:
        (data / "val" / name).mkdir(parents=True)
    for number, (name, (best, *_)) in enumerate(sq.predict(model, [pictures]).items()):
        shutil.copyfile(name, data / "val" / PETS[(best.index + 1) % 3] / f"{number}.png")
    done = run("evaluate", micro / "swin.pth", *scoring_flags, "--data-path", data, "--output", tmp_path / "out")
    assert "guessing among 3 classes does as well" in done.err
