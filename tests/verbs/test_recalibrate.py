"""Ranges searched again in kept statistics equal those of a calibration with the same settings, to the bit."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from nightly import share

import swin_quant as sq
from swin_quant.base.distributed import this_world
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.config import find_config, load_config
from swin_quant.data.picture_set import PictureSet
from swin_quant.loading import ModelFile
from swin_quant.quant.calibration import Method
from swin_quant.quant.policy import Rule, load_policy

NAME = "swin_micro_digits"


def file_of(cfg, checkpoint):
    """The checkpoint as the command opens it, with its config in a file."""
    config = Path(tempfile.mkdtemp()) / "digits.yaml"
    config.write_text(cfg.dump())
    return ModelFile(checkpoint and str(checkpoint), str(config))


def saved(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    model.save_in(folder, this_world())
    return model


def words_of(method):
    percentile = method.percentile if method.name == "percentile" else None
    return {"method": method.name, "percentile": percentile}


def calibrate_checkpoint(cfg, checkpoint, policy, folder, method=None, passes=None):
    pictures = PictureSet("digits", count=4)
    how = words_of(method or Method())
    return saved(sq.calibrate(file_of(cfg, checkpoint), pictures, policy, passes=passes, **how), folder)


def recalibrate(cfg, statistics, checkpoint, policy, method, folder):
    how = words_of(method)
    return saved(sq.calibrate(file_of(cfg, checkpoint), None, policy, statistics=statistics, **how), folder)


def policy(bits):
    return load_policy("ft-mode1").and_then(Rule(nodes=("role:activation",), bits=bits))


def config(depths):
    keys = {"EMBED_DIM": 8, "DEPTHS": depths, "NUM_HEADS": [1, 2]}
    overrides = {"DATA.DATA_PATH": "digits"} | {f"MODEL.SWIN.{key}": value for key, value in keys.items()}
    return load_config(find_config("swin_digits"), overrides=overrides)


@pytest.fixture(scope="module")
def before(cfg, weights, tmp_path_factory):
    """The folder of a calibration by percentile for 8 bits."""
    folder = tmp_path_factory.mktemp("before")
    calibrate_checkpoint(cfg, weights, policy(8), folder)
    return folder


@pytest.fixture
def copy(before, tmp_path):
    """A copy of it with a statistics file that a test may damage."""
    return shutil.copytree(before, tmp_path / "copy") / f"{NAME}_calib.stats.npz"


def content(folder):
    card = json.loads((folder / f"{NAME}_calib.json").read_text())
    for key in ("check", "advice"):  # these need pictures
        card["calibration"].pop(key, None)
    return (folder / f"{NAME}_calib.pth").read_bytes(), {**card, "created": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "bits"),
    share([(Method("mse"), 4), (Method("percentile", 99.0), 8), (Method("entropy"), 3), (Method("max"), 8)], 2),
)
def test_it_is_to_the_bit_what_calibrating_so_gives(cfg, weights, before, tmp_path, method, bits):
    direct = calibrate_checkpoint(cfg, weights, policy(bits), tmp_path / "direct", method)
    statistics = before / f"{NAME}_calib.stats.npz"
    again = recalibrate(cfg, statistics, None, policy(bits), method, tmp_path / "again")
    (file, card), (expected_file, expected) = content(tmp_path / "again"), content(tmp_path / "direct")
    assert file == expected_file
    if method.name == "max":  # calibrating by max counts nothing to keep
        assert expected["calibration"].pop("statistics") is None and card["calibration"].pop("statistics")
    assert card == expected and again.card.calibration["method"] == method.name
    assert direct.card.calibration["bits"] == bits and direct.card.calibration["other_bits"] == {}
    if method.name != "max":
        kept = [tmp_path / name / f"{NAME}_calib.stats.npz" for name in ("direct", "again")]
        assert kept[0].read_bytes() == kept[1].read_bytes() == statistics.read_bytes()


def test_bits_that_are_not_uniform_are_recorded_by_node(cfg, before, tmp_path):
    node = "layers.0.blocks.0.mlp.fc2._input_quantizer"
    mixed = policy(8).and_then(Rule(nodes=(node,), bits=4))
    done = recalibrate(cfg, before / f"{NAME}_calib.stats.npz", None, mixed, Method("max"), tmp_path)
    assert (done.card.calibration["bits"], done.card.calibration["other_bits"]) == (8, {node: 4})


def test_ranges_to_which_a_pass_fitted_weights_are_not_searched_again(cfg, weights, tmp_path):
    passes = [{"name": "gptq", "pictures": 8}]
    calibrate_checkpoint(cfg, weights, policy(4), tmp_path / "made", passes=passes)
    with pytest.raises(UsageError, match="ranges were chosen by gptq: calibrate again, with pictures"):
        recalibrate(cfg, tmp_path / "made" / f"{NAME}_calib.stats.npz", None, policy(8), Method(), tmp_path / "again")


WRONG = {
    "missing": (lambda file: file.unlink(), "no such statistics file"),
    "without its card": (lambda file: file.with_name(f"{NAME}_calib.json").unlink(), f"no run card {NAME}_calib.json"),
    "replaced": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "is not the statistics file of its run card"),
    "with other weights": (
        lambda file: file.with_name(f"{NAME}_calib.pth").write_bytes(b"x"),
        "is a text file, not a checkpoint",
    ),
    "without its checkpoint": (lambda file: file.with_name(f"{NAME}_calib.pth").unlink(), "cannot be read"),
}


@pytest.mark.parametrize("what", WRONG)
def test_statistics_that_are_not_these_are_refused(cfg, copy, tmp_path, what):
    damage, words = WRONG[what]
    damage(copy)
    with pytest.raises(SwinQuantError, match=words):
        recalibrate(cfg, copy, None, policy(8), Method("mse"), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_calibrator_max_says_that_it_keeps_none(cfg, weights, tmp_path):
    calibrate_checkpoint(cfg, weights, policy(8), tmp_path, Method("max"))
    file = tmp_path / f"{NAME}_calib.stats.npz"
    assert not file.exists()
    file.write_bytes(b"left by an earlier one")
    with pytest.raises(SwinQuantError, match="records no statistics .calibrator max keeps none"):
        recalibrate(cfg, file, None, policy(8), Method("mse"), tmp_path)
