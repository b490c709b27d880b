"""What all tests share: one thread, seeds, tiny configs and models, and the way to the shared data folder."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from swin_quant.config import configs_dir, load_config  # swin_quant first: it sets up MKL before any matrix product
from swin_quant.models import build_model
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import apply_policy

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

SHARED = Path(os.environ.get("SWIN_QUANT_SHARED", Path(__file__).parents[2] / "shared"))
ROOT_KEYS = {"IMG_SIZE": "DATA", "NUM_CLASSES": "MODEL", "DROP_RATE": "MODEL", "DROP_PATH_RATE": "MODEL"}


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The cores are shared by the workers of a run; sums in one order make figures repeat."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch):
    """Lines of progress depend on the clock; output that is compared must not."""
    monkeypatch.setattr("swin_quant.progress.clock", lambda: 0.0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared data and checkpoints, which a checkout need not have."""
    if not SHARED.is_dir():
        pytest.skip("no shared data here; SWIN_QUANT_SHARED may name its folder")
    return SHARED


@pytest.fixture(scope="session")
def tiny_config():
    """make("swin" | "swinv2", KEY=value ...) -> the digits demo's config, keys of the architecture replaced."""

    def make(kind="swin", **keys):
        overrides = {f"{ROOT_KEYS.get(key, f'MODEL.{kind.upper()}')}.{key}": value for key, value in keys.items()}
        return load_config(configs_dir() / "demo" / f"{kind}_digits.yaml", overrides=overrides)

    return make


@pytest.fixture(scope="session")
def randomise():
    """Give every parameter of a model seeded random values; V2's norms, zero when built, would hide its branches."""

    def fill(model, seed=0):
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("logit_scale"):  # around 10, some beyond the limit of 100
                value = 2.3 + 1.5 * noise
            elif "norm" in name:
                value = 0.1 * noise + (1.0 if name.endswith("weight") else 0.0)
            elif name.endswith("weight"):
                value = noise / parameter[0].numel() ** 0.5
            else:
                value = 0.3 * noise
            parameter.data.copy_(value)
        return model

    return fill


@pytest.fixture(scope="session")
def tiny_model(tiny_config, randomise):
    """make("swin" | "swinv2", seed=0, KEY=value ...) -> a random tiny model in evaluation mode, nodes off."""

    def make(kind="swin", seed=0, **keys):
        return randomise(build_model(tiny_config(kind, **keys)), seed)

    return make


@pytest.fixture(scope="session")
def use_policy():
    """Apply a built-in policy by name to a model; returns the model."""

    def use(model, name):
        apply_policy(model, load_policy(name))
        return model

    return use
