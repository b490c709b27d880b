"""Input for verbs: a micro model in memory, its pictures as data sets and as tensors, a checkpoint of digits."""

import inspect
import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import Reached, command
from torch.utils.data import DataLoader, TensorDataset

import swin_quant as sq
from swin_quant.cards.card import RunCard, verify_checkpoint
from swin_quant.checkpoint import load_float, save_float
from swin_quant.config import load_config
from swin_quant.data.loader import load_batches
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from swin_quant.models import build_model
from swin_quant.quant.policy import settings_for
from swin_quant.verbs.search_costs import Timer
from tests.outliers import plant


@pytest.fixture
def model(micro):
    return sq.load(micro / "swin.pth", config=micro / "swin.yaml")


@pytest.fixture
def clock(monkeypatch):
    """An engine with known times: 3 ms, and 0.01 ms less for each enabled node. Nothing is exported or run."""

    def milliseconds(model, policy):
        return 3 - 0.01 * sum(one.enabled for one in settings_for(model, policy).values()) if policy else 3.0

    def rounds(timer, policy):
        return [(milliseconds(timer.model.network, timer.base), milliseconds(timer.model.network, policy))]

    monkeypatch.setattr(Timer, "rounds", rounds)


@pytest.fixture
def train(pictures):
    return sq.pictures(pictures, "train", 8)


@pytest.fixture
def val(pictures):
    return sq.pictures(pictures, "val")


@pytest.fixture(scope="session")
def tensors(pictures):
    """tensors("train" | "val", size) -> a DataLoader of the prepared pictures."""

    def load(split, size=3):
        opened = sq.pictures(pictures, split).open()
        preprocess = Preprocess(32, False, "bicubic", IMAGENET_MEAN, IMAGENET_STD)
        batch = next(load_batches(opened, preprocess, [range(len(opened))]))
        return DataLoader(TensorDataset(batch.images, batch.labels), batch_size=size)

    return load


@pytest.fixture(scope="session")
def calibrated_32(tmp_path_factory, write_config, pictures, randomise):
    """micro_calib.pth, beside micro.yaml and micro.pth: heads of 32 channels, as FasterTransformer's kernels and the
    CUDA engine's need."""
    folder = tmp_path_factory.mktemp("calibrated_32")
    config = write_config(folder, "swin", "micro", EMBED_DIM=32)
    torch.save({"model": randomise(build_model(load_config(config))).state_dict()}, folder / "micro.pth")
    words = ["calibrate", "--cfg", config, "--checkpoint", folder / "micro.pth", "--data-path", pictures]
    command(*words, *"--pictures 8 --batch 4 --policy ft-mode1 --device cpu --quiet --output".split(), folder)
    return folder / "micro_calib.pth"


@pytest.fixture
def planted(micro, tmp_path):
    """The micro V1 with outlier channels; its function is unchanged."""
    model = build_model(load_config(micro / "swin.yaml"))
    load_float(model, micro / "swin.pth")
    path = tmp_path / "planted.pth"
    save_float(plant(model, "norms", 100), path)
    return path


@pytest.fixture
def own(calibrated, tmp_path):
    """A copy of the calibrated file, with all that lies beside it, which a test may add to or damage."""
    for file in calibrated.parent.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    return tmp_path / calibrated.name


@pytest.fixture
def with_card(card_of, tmp_path):
    """with_card(file, KEY=value ...) -> a copy of a checkpoint or an artifact whose run card has these values."""

    def copied(file, **changes):
        copy = Path(shutil.copy(file, tmp_path))
        copy.with_suffix(".json").write_text(json.dumps(card_of(file) | changes))
        return copy

    return copied


@pytest.fixture
def calibrate(run, float_flags, card_of, tmp_path):
    """calibrate(flags ...) -> (state_dict, card) of a calibration with `float_flags` and these; "--scored": on val."""

    def go(*flags, out="out", name="swin_micro"):
        asked = [flag for flag in flags if flag != "--scored"]
        run("calibrate", *float_flags, "--output", tmp_path / out, *asked).ok()
        path = tmp_path / out / f"{name}_calib.pth"
        verify_checkpoint(RunCard.read(path.with_suffix(".json")), path)
        return torch.load(path, weights_only=True), card_of(path)

    return go


@pytest.fixture
def float_run(micro, pictures, tmp_path):
    """Float training of 2 epochs x 6 steps."""
    recipe = tmp_path / "float.yaml"
    recipe.write_text("epochs: 2\nbatch_size: 2\naugment: {crop: padded, cutmix: 1.0}\nema: 0.9\n")
    flags = ["--cfg", micro / "swin.yaml", "--data-path", pictures, "--device", "cpu", "--half", "none"]
    return ["train", *flags, "--recipe", recipe, "--no-eval"]


@pytest.fixture
def heard(monkeypatch):
    """heard(owner, name, ends=False) -> the arguments by name of every call; `ends`: the first one ends the verb."""

    def listen(owner, name, ends=False):
        own, calls = getattr(owner, name), []

        def call(*arguments, **options):
            calls.append(inspect.signature(own).bind(*arguments, **options).arguments)
            if ends:
                raise Reached
            return own(*arguments, **options)

        monkeypatch.setattr(owner, name, call)
        return calls

    return listen
