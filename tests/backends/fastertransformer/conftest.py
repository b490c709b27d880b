"""Exports of calibrated micro models, and their cards."""

import pytest

from swin_quant.backends.fastertransformer.export import FasterTransformerOptions, export
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.cards.card import RunCard
from swin_quant.quant.policy import load_policy


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
