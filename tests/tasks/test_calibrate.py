"""Calibration as a library call: what it returns is what it wrote, and what cannot work is refused at once."""

import json

import pytest
import torch

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import sha256_of
from swin_quant.checkpoint import load_calibrated, save_float
from swin_quant.config import find_config, load_config
from swin_quant.config.load import portable_config
from swin_quant.data.sources import has_split
from swin_quant.models import build_model
from swin_quant.quant.calibration import Method
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import enabled_nodes
from swin_quant.quant.quantizer import State, named_nodes
from swin_quant.verbs.calibrate import CalibrationPlan, calibrate_checkpoint

PLAN = CalibrationPlan(batches=1, batch_size=4)


@pytest.fixture(scope="module")
def cfg():
    return load_config(find_config("swin_digits"), overrides={"DATA.DATA_PATH": "digits", "MODEL.SWIN.EMBED_DIM": 8})


@pytest.fixture(scope="module")
def weights(cfg, randomise, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    save_float(randomise(build_model(cfg)), path)
    return str(path)


def test_the_model_returned_is_the_one_written(cfg, weights, tmp_path):
    done = calibrate_checkpoint(cfg, weights, load_policy("ft-mode2"), PLAN, tmp_path / "a" / "b")
    assert done.checkpoint == tmp_path / "a" / "b" / "swin_micro_digits_calib.pth"
    again = build_model(cfg)
    load_calibrated(again, done.checkpoint)
    for name, node in named_nodes(again).items():
        mine = named_nodes(done.module)[name]
        assert torch.equal(node.amax, mine.amax) and mine.state is State.OFF and mine.observer is None
    assert len(enabled_nodes(done.module)) == 8 * 15 + 3 * 2  # eight blocks, three mergings, mode 2
    assert json.loads(done.checkpoint.with_suffix(".json").read_text())["checkpoint"] == done.card.checkpoint


def test_the_policy_changes_no_byte_of_the_checkpoint(cfg, weights, tmp_path):
    """docs/reference, section 1.5: the saved file is the same for modes 1 and 2."""
    files = [
        calibrate_checkpoint(cfg, weights, load_policy(name), PLAN, tmp_path / name).checkpoint.read_bytes()
        for name in ("ft-mode1", "ft-mode2", "qdq", "float")
    ]
    assert len(set(files)) == 1


def test_the_original_stays_the_float_file_through_another_calibration(cfg, weights, tmp_path):
    """Also over the calibrated file itself, whose own hash would then be of no file that there is."""
    first = calibrate_checkpoint(cfg, weights, load_policy("ft-mode1"), PLAN, tmp_path)
    again = calibrate_checkpoint(cfg, str(first.checkpoint), load_policy("ft-mode2"), PLAN, tmp_path)
    assert again.card.source and again.card.source["sha256"] == sha256_of(weights)
    unknown = calibrate_checkpoint(cfg, None, load_policy("ft-mode1"), PLAN, tmp_path / "random")
    again = calibrate_checkpoint(cfg, str(unknown.checkpoint), load_policy("ft-mode1"), PLAN, tmp_path / "again")
    assert again.card.source and again.card.source["sha256"] == sha256_of(unknown.checkpoint)


def test_random_weights_are_the_seed_s(cfg, tmp_path):
    policy = load_policy("ft-mode1")
    one, two = (calibrate_checkpoint(cfg, None, policy, PLAN, tmp_path / name) for name in "ab")
    assert one.checkpoint.read_bytes() == two.checkpoint.read_bytes() and one.card.source is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CalibrationPlan(batches=0), "pictures 0"),
        (lambda: CalibrationPlan(batch_size=-1), "batch -1"),
        (lambda: CalibrationPlan(method=Method("best")), "calibrator best"),
        (lambda: CalibrationPlan(method=Method("percentile", 101.0)), "percentile 101"),
        (lambda: CalibrationPlan(method=Method("percentile", float("nan"))), "percentile nan"),
    ],
)
def test_a_plan_that_cannot_be(make, says):
    with pytest.raises(UsageError, match=says):
        make()


def test_refusals_come_before_the_first_forward(cfg, weights, tmp_path, monkeypatch):
    monkeypatch.setattr("swin_quant.verbs.calibration_result.observing", lambda *_: pytest.fail("a forward"))
    policy = load_policy("ft-mode1")
    (tmp_path / "file").write_text("x")
    with pytest.raises(SwinQuantError, match="it is a file"):
        calibrate_checkpoint(cfg, weights, policy, PLAN, tmp_path / "file")
    with pytest.raises(SwinQuantError, match="no such checkpoint"):
        calibrate_checkpoint(cfg, str(tmp_path / "none.pth"), policy, PLAN, tmp_path)
    with pytest.raises(UsageError, match="choose one of train, val"):
        calibrate_checkpoint(cfg, weights, policy, CalibrationPlan(split="test"), tmp_path)


def test_a_portable_config_names_no_folder():
    keys = {"DATA.DATA_PATH": "/home/me/imagenet", "MODEL.RESUME": "/tmp/x.pth", "OUTPUT": "/scratch/out"}
    text = json.dumps(portable_config(load_config(find_config("swin_digits"), overrides=keys)))
    assert "imagenet" in text and "x.pth" in text
    assert "/home" not in text and "/tmp" not in text and "/scratch" not in text


def test_which_splits_there_are(cfg, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "val.zip").touch()
    (tmp_path / "val_map.txt").touch()
    (tmp_path / "test.zip").touch()  # whose map is missing

    def held(zip_mode):
        keys = {"DATA.DATA_PATH": str(tmp_path), "DATA.ZIP_MODE": zip_mode}
        config = load_config(find_config("swin_digits"), overrides=keys)
        return [split for split in ("train", "val", "test") if has_split(config, split)]

    assert held(False) == ["train", "val"] and held(True) == ["val", "test"] and has_split(cfg, "val")
