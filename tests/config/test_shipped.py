"""Shipped configurations: their keys are those of docs/reference, and they are found by name."""

import pytest

from swin_quant.base.errors import UsageError
from swin_quant.base.files import configs_dir
from swin_quant.config import architecture, find_config, load_config
from swin_quant.config.sides import clipped, compute_map_size
from tests.helpers.refusals import refused

FILES = sorted(file for folder in ("swin", "swinv2") for file in (configs_dir() / folder).glob("[!_]*.yaml"))
SIZES = {
    "tiny": (96, [2, 2, 6, 2], [3, 6, 12, 24]),
    "small": (96, [2, 2, 18, 2], [3, 6, 12, 24]),
    "base": (128, [2, 2, 18, 2], [4, 8, 16, 32]),
    "large": (192, [2, 2, 18, 2], [6, 12, 24, 48]),
}
# docs/reference, section 1.2: (picture, WINDOW_SIZE) -> stage resolutions and windows in use.
STAGES = {
    (224, 7): ([56, 28, 14, 7], [7, 7, 7, 7]),
    (384, 12): ([96, 48, 24, 12], [12, 12, 12, 12]),
    (256, 8): ([64, 32, 16, 8], [8, 8, 8, 8]),
    (256, 16): ([64, 32, 16, 8], [16, 16, 16, 8]),
    (384, 24): ([96, 48, 24, 12], [24, 24, 24, 12]),
    (192, 12): ([48, 24, 12, 6], [12, 12, 12, 6]),
}
SCHEDULES = {
    "-": (300, 20, 0.05, 5e-4, 5e-7, 5e-6),
    "swin 22k": (90, 5, 0.05, 1.25e-4, 1.25e-7, 1.25e-6),
    "swinv2 22k": (90, 5, 0.1, 1.25e-4, 1.25e-7, 1.25e-6),
    "finetune": (30, 5, 1e-8, 2e-5, 2e-8, 2e-7),
}
# Section 7.1, the columns IMG, WINDOW, DROP_PATH, schedule and CROP of every file.
TABLE = {
    "swin_base_patch4_window12_384_22kto1k_finetune": (384, 12, 0.2, "finetune", False),
    "swin_base_patch4_window12_384_finetune": (384, 12, 0.5, "finetune", False),
    "swin_base_patch4_window7_224": (224, 7, 0.5, "-", True),
    "swin_base_patch4_window7_224_22k": (224, 7, 0.2, "swin 22k", True),
    "swin_base_patch4_window7_224_22kto1k_finetune": (224, 7, 0.2, "finetune", True),
    "swin_large_patch4_window12_384_22kto1k_finetune": (384, 12, 0.2, "finetune", False),
    "swin_large_patch4_window7_224_22k": (224, 7, 0.2, "swin 22k", True),
    "swin_large_patch4_window7_224_22kto1k_finetune": (224, 7, 0.2, "finetune", True),
    "swin_small_patch4_window7_224": (224, 7, 0.3, "-", True),
    "swin_small_patch4_window7_224_22k": (224, 7, 0.2, "swin 22k", True),
    "swin_small_patch4_window7_224_22kto1k_finetune": (224, 7, 0.2, "finetune", True),
    "swin_tiny_c24_patch4_window8_256": (256, 8, 0.2, "-", True),
    "swin_tiny_patch4_window7_224": (224, 7, 0.2, "-", True),
    "swin_tiny_patch4_window7_224_22k": (224, 7, 0.1, "swin 22k", True),
    "swin_tiny_patch4_window7_224_22kto1k_finetune": (224, 7, 0.1, "finetune", True),
    "swinv2_base_patch4_window12_192_22k": (192, 12, 0.2, "swinv2 22k", True),
    "swinv2_base_patch4_window12to16_192to256_22kto1k_ft": (256, 16, 0.2, "finetune", True),
    "swinv2_base_patch4_window12to24_192to384_22kto1k_ft": (384, 24, 0.2, "finetune", False),
    "swinv2_base_patch4_window16_256": (256, 16, 0.5, "-", True),
    "swinv2_base_patch4_window8_256": (256, 8, 0.5, "-", True),
    "swinv2_large_patch4_window12_192_22k": (192, 12, 0.2, "swinv2 22k", True),
    "swinv2_large_patch4_window12to16_192to256_22kto1k_ft": (256, 16, 0.2, "finetune", True),
    "swinv2_large_patch4_window12to24_192to384_22kto1k_ft": (384, 24, 0.2, "finetune", False),
    "swinv2_small_patch4_window16_256": (256, 16, 0.3, "-", True),
    "swinv2_small_patch4_window8_256": (256, 8, 0.3, "-", True),
    "swinv2_tiny_patch4_window16_256": (256, 16, 0.2, "-", True),
    "swinv2_tiny_patch4_window8_256": (256, 8, 0.2, "-", True),
}


def test_every_file_of_the_table_is_shipped_and_no_other():
    assert {file.stem: file.parent.name for file in FILES} == {name: name.split("_")[0] for name in TABLE}
    assert len(FILES) == 27


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_file_says_what_the_table_says(file):
    cfg = load_config(file)
    picture, window, drop_path, schedule, crop = TABLE[file.stem]
    embed, depths, heads = SIZES[file.stem.split("_")[1]]
    swin = architecture(cfg)
    assert cfg.MODEL.NAME == file.stem
    assert cfg.MODEL.TYPE == file.parent.name
    assert (cfg.DATA.IMG_SIZE, swin.WINDOW_SIZE, cfg.TEST.CROP) == (picture, window, crop)
    assert cfg.MODEL.DROP_PATH_RATE == drop_path
    assert (swin.EMBED_DIM, swin.DEPTHS) == (embed, depths)
    assert swin.NUM_HEADS == ([4, 8, 16, 32] if "_c24_" in file.stem else heads)
    assert (swin.PATCH_SIZE, swin.IN_CHANS, swin.MLP_RATIO) == (4, 3, 4.0)
    assert (swin.QKV_BIAS, swin.APE, swin.PATCH_NORM) == (True, False, True)
    train = cfg.TRAIN
    rates = (train.WEIGHT_DECAY, train.BASE_LR, train.WARMUP_LR, train.MIN_LR)
    assert (train.EPOCHS, train.WARMUP_EPOCHS, *rates) == SCHEDULES[schedule]
    assert all(type(rate) is float for rate in rates)
    pretraining = schedule.endswith("22k")
    assert (cfg.DATA.DATASET, cfg.MODEL.NUM_CLASSES) == (("imagenet22K", 21841) if pretraining else ("imagenet", 1000))
    if cfg.MODEL.TYPE == "swinv2":
        assert swin.PRETRAINED_WINDOW_SIZES == ([12, 12, 12, 6] if "12to" in file.stem else [0, 0, 0, 0])
        assert "QK_SCALE" not in swin


@pytest.mark.parametrize(("picture", "window"), STAGES)
def test_maps_and_windows_are_those_of_the_specification(picture, window):
    maps = [compute_map_size(picture, 4, stage) for stage in range(4)]
    windows = [clipped(window, size) for size in maps]
    assert ([side for side, _ in maps], [side for side, _ in windows]) == STAGES[picture, window]
    assert {(cfg.DATA.IMG_SIZE, architecture(cfg).WINDOW_SIZE) for cfg in map(load_config, FILES)} == STAGES.keys()


def test_find_config_prefers_a_file_then_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "swin_tiny_patch4_window7_224"
    assert find_config(name) == configs_dir() / "swin" / f"{name}.yaml"
    (tmp_path / "mine.yaml").write_text("{}")
    assert find_config("mine.yaml").read_text() == "{}"
    (tmp_path / name).mkdir()
    assert find_config(name).parent.name == "swin"


def test_find_config_suggests_what_is_close(tmp_path):
    with pytest.raises(UsageError, match="no such file or shipped configuration: .*window7_22.yaml; there is") as error:
        find_config(tmp_path / "swin_tiny_patch4_window7_22.yaml")
    assert "swin_tiny_patch4_window7_224," in str(error.value) and "\n" not in str(error.value)
    refused(lambda: find_config("resnet?"), "and 24 more", kind=UsageError)
    with pytest.raises(UsageError, match="there is swin_tiny_[^ ]*window7_224") as error:
        find_config("swin_tini")
    assert "digits" not in str(error.value)
    refused(lambda: find_config("_base"), "no such file or shipped configuration: _base", kind=UsageError)
