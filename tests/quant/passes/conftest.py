"""Calibrated micro models of two blocks and a patch merging, and the contexts of passes on them."""

from copy import deepcopy

import pytest
import torch

from swin_quant.models.registry import list_exchanges, list_units
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.passes import PassContext
from swin_quant.quant.policy import apply_policy, load_policy

SMALL = {"EMBED_DIM": 16, "DEPTHS": [1, 1], "NUM_HEADS": [1, 2]}


@pytest.fixture(scope="session")
def images():
    return torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="session")
def small(tiny_model):
    return lambda kind="swin", **keys: tiny_model(kind, **SMALL, **keys)


@pytest.fixture(scope="session")
def make_context(small, images):
    """make(kind, policy, bits, activations, pictures, KEY=value ...) -> a context of a calibrated model."""
    made = {}

    def make(kind="swin", policy="qdq", bits=4, activations=8, pictures=16, **keys):
        which = kind, policy, bits, activations, repr(keys)
        if which not in made:
            model = small(kind, **keys)
            apply_policy(model, load_policy(policy).bits("role:gemm_weight", bits).bits("role:activation", activations))
            calibrate(model, images.split(8))
            made[which] = model
        model = deepcopy(made[which])
        given, units = images[:pictures].split(8), list_units(model)
        return PassContext(model, given, units=units, exchanges=list_exchanges(model))

    return make
