"""Shipped configurations as launches, and exports of calibrated micro models to the engine."""

from dataclasses import replace

import pytest

from swin_quant.backends.cuda.export import CudaOptions, export
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.spec import make_spec_from_config
from swin_quant.backends.fastertransformer.emulator import Emulator
from swin_quant.backends.fastertransformer.export import export as export_ft
from swin_quant.backends.fastertransformer.manifest import read_export
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.cards.card import RunCard
from swin_quant.config import find_config, load_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.quant.policy import load_policy

PREPROCESS = Preprocess(size=8, crop=False, interpolation="bicubic", mean=(0.485, 0.456, 0.406), std=(0.229, 0.2, 0.3))


def spec_of_model(name, precision="int8"):
    """The spec of a shipped configuration in int8, fp8, float or FasterTransformer's arithmetic."""
    spec = make_spec_from_config(load_config(find_config(name)), "int8" if precision.startswith("ft") else precision)
    if precision.startswith("ft"):
        return replace(spec, arithmetic=precision, quantized=frozenset(spec.products()))
    return spec


def launches_of(name, precision="int8", batch=32):
    """The launches of a shipped configuration, none fused."""
    return build_program(spec_of_model(name, precision), batch).launches


@pytest.fixture(scope="session")
def calibrated(calibrated):
    """The same with the engine's own policy by default."""
    return lambda kind="swin", policy="cuda", **keys: calibrated(kind, policy, **keys)


@pytest.fixture
def emulator_of(tmp_path):
    """emulator_of(model, policy, ...) -> FasterTransformer's emulator on an export of the model under this policy."""

    def make(model, policy, **how):
        card = RunCard("micro", {}, {}, policy=load_policy(policy).to_dict())
        return Emulator(read_export(export_ft(model, card, tmp_path / f"{policy}-ft")), **how)

    return make


@pytest.fixture
def exported(tmp_path, calibrated):
    """exported("swin", "cuda", {KEY: value}, precision="int8", ...) -> the artifact, opened again, and its model."""

    def make(kind="swin", policy="cuda", keys=None, **options):
        model = calibrated(kind, policy, **(keys or {}))
        chosen = load_policy(policy) if isinstance(policy, str) else policy
        card = RunCard("micro", {}, PREPROCESS.to_dict(), policy=chosen.to_dict())
        return open_artifact(export(model, card, tmp_path, CudaOptions(**options)).file), model

    return make
