"""Calibrated micro models of each version under any policy, and their exports to the engine."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swin_quant.backends.artifact import open_artifact
from swin_quant.backends.cuda.export import CudaOptions, export
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.planning import spec_of_config
from swin_quant.cards.card import RunCard
from swin_quant.config import find_config, load_config
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.policy import apply_policy, load_policy

# Two stages, windows of 2 on 4 x 4 and 2 x 2 tokens: shifted and plain blocks, a mask and a patch merging.
MICRO = {"IMG_SIZE": 8, "DEPTHS": [2, 1], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 2, "NUM_CLASSES": 5}
# Four heads of 24 channels and eight, in windows of 8 on 16 x 16 and 8 x 8 tokens.
HEADS_OF_24 = {"IMG_SIZE": 32, "EMBED_DIM": 96, "NUM_HEADS": [4, 8], "WINDOW_SIZE": 8}
MORE = {"swin": {}, "swinv2": {"PRETRAINED_WINDOW_SIZES": [0, 0]}}

HERE = Path(__file__).parent
COMPILING = {
    f"test_{name}.py" for name in ("ahead", "cross_compiled", "crosscompile", "fusions", "interpreted", "trained")
}


def pytest_collection_modifyitems(config, items):
    """Take a sample of the tests that interpret or compile kernels, if all passed on these sources (`make kernels`).

    All of them run on a GPU, and if tests of this folder are named.
    """
    # Imported here: child processes of tests import this file without the helpers
    from kernels_green import is_chosen, is_green

    by_name = any(Path(word.split("::")[0]).resolve().is_relative_to(HERE) for word in config.args)
    if by_name or torch.cuda.is_available() or not is_green():
        return
    skip = pytest.mark.skip(reason="kernels are those that every test passed on: KERNELS=all runs each")
    for item in items:
        in_kernels = item.path.is_relative_to(HERE / "kernels")
        compiles = item.path.parent == HERE and item.path.name in COMPILING and item.get_closest_marker("slow")
        if (in_kernels or compiles) and not is_chosen(item.nodeid):
            item.add_marker(skip)


def spec_of_model(name, precision="int8"):
    """The spec of a shipped configuration in int8, fp8, float or FasterTransformer's arithmetic."""
    spec = spec_of_config(load_config(find_config(name)), "int8" if precision.startswith("ft") else precision)
    if precision.startswith("ft"):
        return replace(spec, arithmetic=precision, quantized=frozenset(spec.products()))
    return spec


def launches_of(name, precision="int8", batch=32):
    """The launches of a shipped configuration, none fused."""
    return program_of(spec_of_model(name, precision), batch).launches


def pictures(count, size=8, seed=1):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def calibrated(tiny_model):
    """make("swin" | "swinv2", policy, KEY=value ...) -> a random micro model with ranges and a policy applied.

    `policy` is a built-in name, or a policy.
    """
    made = {}

    def make(kind="swin", policy="cuda", **keys):
        which = kind, repr(keys)
        if which not in made:
            model = tiny_model(kind, **(MICRO | MORE[kind] | keys))
            apply_policy(model, load_policy("ft-mode1"))
            calibrate(model, [pictures(8, model.input_shape[1])])
            made[which] = model
        model = deepcopy(made[which])
        apply_policy(model, load_policy(policy) if isinstance(policy, str) else policy)
        return model

    return make


@pytest.fixture
def exported(tmp_path, calibrated):
    """exported("swin", "cuda", {KEY: value}, precision="int8", ...) -> the artifact, opened again, and its model."""

    def make(kind="swin", policy="cuda", keys=None, **options):
        model = calibrated(kind, policy, **(keys or {}))
        chosen = load_policy(policy) if isinstance(policy, str) else policy
        made = export(model, RunCard("micro", {}, {}, policy=chosen.to_dict()), tmp_path, CudaOptions(**options))
        return open_artifact(made.file), model

    return make
