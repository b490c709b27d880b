"""A GPU for every test here, which is marked `gpu` and skipped without one.

SWIN_QUANT_GPU=cpu uses the CPU instead: a dry run of the tests themselves, which shows nothing about a GPU.
"""

import os
from copy import deepcopy

import pytest
import torch

from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import apply_policy, load_policy, quantize


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The first GPU, or the CPU instead."""
    if os.environ.get("SWIN_QUANT_GPU") == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def cuda(gpu) -> torch.device:
    """The first GPU, for what a CPU has not: queues, graphs, compiled kernels."""
    if gpu.type != "cuda":
        pytest.skip("it is a GPU's")
    return gpu


@pytest.fixture(scope="session")
def images():
    return torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def calibrated(tiny_model, images):
    """make(kind, policy="ft-mode1", method="max") -> a quantizing model on the CPU with ranges, without drop path."""
    made = {}

    def make(kind, policy="ft-mode1", method="max"):
        if (kind, policy, method) not in made:
            model = tiny_model(kind, DROP_PATH_RATE=0.0)
            apply_policy(model, load_policy(policy))
            calibrate(model, images.split(8), Method(method))
            quantize(model)
            made[kind, policy, method] = model
        return deepcopy(made[kind, policy, method])

    return make
