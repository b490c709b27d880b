"""A checkpoint is read and hashed once, however many functions use it."""

import pytest
import torch

from swin_quant.base.errors import SwinQuantError
from swin_quant.cards.card import RunCard
from swin_quant.checkpoint import load_float, made_before, open_checkpoint, opened, save_float
from swin_quant.checkpoint.class_names import read_class_names
from swin_quant.checkpoint.identify import config_for, config_given
from swin_quant.models import build_model


@pytest.fixture
def counted(monkeypatch):
    """The names of the functions that read a file, one entry a call."""

    calls = []
    for module, name in ((opened, "compute_sha256"), (opened, "read_state_dict"), (opened, "find_card")):
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, _name=name, _read=original: calls.append(_name) or _read(*given)
        )
    return calls


def test_every_question_shares_one_reading(micro, counted):
    checkpoint = open_checkpoint(micro / "swin.pth")
    assert counted == [] and open_checkpoint(checkpoint) is checkpoint
    cfg = config_for(checkpoint)
    config_given(micro / "swin.yaml", checkpoint)
    source = load_float(build_model(cfg), checkpoint)
    assert read_class_names(cfg, checkpoint) == [] and made_before(checkpoint) is None
    assert source.sha256 == checkpoint.sha256 and not checkpoint.is_calibrated
    assert not checkpoint.has_zero_points
    assert sorted(counted) == ["compute_sha256", "find_card", "read_state_dict"]


def test_a_card_of_another_file_stops_only_what_was_calibrated(micro, tmp_path, tiny_model):
    assert open_checkpoint(tmp_path).file == tmp_path and made_before(None) is None
    for name, state in (("float", {}), ("calibrated", {"head._amax": torch.tensor(1.0)})):
        file = tmp_path / f"{name}.pth"
        model = tiny_model()
        save_float(model, file)
        torch.save({**torch.load(file)["model"], **state}, file)
        RunCard("x", {}, {}, checkpoint={"file": file.name, "sha256": "0" * 64}).write(file.with_suffix(".json"))
        if state:
            with pytest.raises(SwinQuantError, match="is not the checkpoint of its run card"):
                made_before(file)
        else:
            assert made_before(file) is None


@pytest.mark.parametrize(
    "command, more",
    [
        ("calibrate", ["--pictures", 4]),
        ("evaluate", ["--half", "none"]),
        ("train", ["--epochs", 1, "--batch", 4, "--no-eval"]),
        ("show", ["--policy", "qdq"]),
    ],
)
def test_a_command_reads_its_checkpoint_once(command, more, micro, pictures, run, tmp_path, counted):
    file = micro / "swin.pth"
    if command in ("calibrate", "evaluate", "train"):
        more = [*more, "--data-path", pictures, "--device", "cpu", "--output", tmp_path]
    assert run(command, file, "--cfg", micro / "swin.yaml", *more).code == 0
    assert counted.count("read_state_dict") == 1
