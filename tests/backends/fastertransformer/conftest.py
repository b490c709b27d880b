"""A calibrated micro model of each version, and exports of it."""

from copy import deepcopy

import pytest
import torch

from swin_quant.backends.artifact import open_artifact
from swin_quant.backends.fastertransformer.export import FasterTransformerOptions, export
from swin_quant.cards.card import RunCard
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.policy import apply_policy, load_policy

# Two stages, windows of 2 on 4 x 4 and 2 x 2 tokens: shifted and plain blocks, a mask and a patch merging.
MICRO = {"IMG_SIZE": 8, "DEPTHS": [2, 1], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 2, "NUM_CLASSES": 5}
MORE = {"swin": {}, "swinv2": {"PRETRAINED_WINDOW_SIZES": [0, 0]}}


@pytest.fixture(scope="session")
def calibrated(tiny_model):
    """make("swin" | "swinv2", KEY=value ...) -> a random micro model, calibrated on random pictures once a session."""
    made = {}

    def make(kind="swin", **keys):
        which = kind, repr(keys)
        if which not in made:
            model = tiny_model(kind, **(MICRO | MORE[kind] | keys))
            size = model.geometry.image_size
            pictures = torch.randn(8, 3, size, size, generator=torch.Generator().manual_seed(1))
            apply_policy(model, load_policy("ft-mode1"))
            calibrate(model, [pictures])
            made[which] = model
        return deepcopy(made[which])

    return make


@pytest.fixture(scope="session")
def card():
    """card(mode) -> the run card of a checkpoint under ft-mode1 or ft-mode2."""
    return lambda mode=1: RunCard("micro", {}, {}, policy=load_policy(f"ft-mode{mode}").to_dict())


@pytest.fixture
def exported(tmp_path, calibrated, card):
    """exported("swin", mode=1, sm=80, ...) -> the artifact, opened again, and its model."""

    def make(version="swin", mode=1, kind="int8", **options):
        model = calibrated(version)
        options |= {} if kind == "int8" else {"precision": "float", "float_type": kind}
        made = export(model, card(mode), tmp_path / f"{version}{mode}", FasterTransformerOptions(**options))
        return open_artifact(made.file), model

    return make
