"""The candidates of a bench: the float models always, each under a name of its own."""

import shutil
from dataclasses import replace

import pytest
from cards_of_results import TRAINING

from swin_quant.backends.openvino import engine as openvino
from swin_quant.base.errors import UsageError
from swin_quant.cards.card import RunCard
from swin_quant.config.load import portable_config
from swin_quant.data.preprocess import Preprocess
from swin_quant.model import save_with_card
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import apply_policy, load_policy
from swin_quant.verbs.bench_candidates import REFERENCE, bench_candidates
from swin_quant.verbs.export_target import export_checkpoint
from tests.helpers.cards_of_results import CALIBRATION

MICRO = {"EMBED_DIM": 16, "DEPTHS": [1, 1], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tiny_config, tiny_model):
    """A function that writes a calibrated micro model with a seed into its own folder."""
    import torch

    def make(seed, policy="ft-mode1", **sizes):
        cfg, model = tiny_config(**MICRO | sizes), tiny_model(seed=seed, **MICRO | sizes)
        apply_policy(model, policy := load_policy(policy))
        calibrate(model, [torch.randn(2, 3, 32, 32)], Method("max"))
        card = RunCard("micro", portable_config(cfg), Preprocess.from_config(cfg).to_dict(), policy=policy.to_dict())
        file = tmp_path_factory.mktemp("checkpoint") / "micro_calib.pth"
        save_with_card(model, file, card)
        return file

    return make


@pytest.fixture(scope="module")
def first(checkpoint):
    return checkpoint(0)


@pytest.fixture(scope="module")
def exported(first):
    """An int8 and a float export for OpenVINO, beside the checkpoint."""
    return [
        str(export_checkpoint(first, "openvino", first.parent, precision=precision)[0].file)
        for precision in ("int8", "float")
    ]


@pytest.fixture
def names(tmp_path):
    def of(paths, engines=None, float_types=("float32",), checkpoint=None):
        found = bench_candidates(paths, engines, float_types, checkpoint, tmp_path, 1).candidates
        return [one.name for one in found], {one.name: one.baseline for one in found}

    return of


@pytest.mark.slow
def test_a_float_export_that_is_given_is_the_baseline(names, exported, tmp_path):
    found, baselines = names(exported)
    assert found == [REFERENCE, "openvino float32", "openvino int8 cpu"]
    assert baselines == {
        REFERENCE: None,
        "openvino float32": "openvino float32",
        "openvino int8 cpu": "openvino float32",
    }
    assert list(tmp_path.iterdir()) == []  # nothing was exported


@pytest.mark.slow
def test_the_baseline_runs_in_float32_whatever_else_is_asked_for(names, exported, monkeypatch):
    monkeypatch.setattr(openvino, "float_types", lambda: ["float32", "bfloat16"])
    found, _ = names(exported, float_types=["bfloat16"])
    assert found == [REFERENCE, "openvino float32", "openvino bfloat16", "openvino int8 cpu +bfloat16"]
    found, _ = names(exported, float_types=None)
    assert found[3:] == ["openvino int8 cpu", "openvino int8 cpu +bfloat16"]


@pytest.mark.nightly
def test_float_candidates_with_the_weights_of_qat_are_called_so(names, first, tmp_path_factory):
    """They are baselines of latency, not the original that accuracy is compared with."""
    file = shutil.copy(first, tmp_path_factory.mktemp("qat") / first.name)
    card = RunCard.read(first.with_suffix(".json"))
    replace(card, training=TRAINING).write(file.with_suffix(".json"))
    found, baselines = names([str(file)], ["onnxruntime"])
    assert found[:2] == [f"{REFERENCE}, QAT weights", "onnxruntime float32, QAT weights"]
    assert len(found) == 3 and "QAT" not in found[2]
    assert set(baselines.values()) == {None, "onnxruntime float32, QAT weights"}


@pytest.mark.nightly
def test_a_float_baseline_in_a_wider_type_is_found(checkpoint, tmp_path):
    """Values beyond float16 make the CUDA engine's own float export bfloat16."""
    file = checkpoint(0, "cuda", EMBED_DIM=32)
    card = RunCard.read(file.with_suffix(".json"))
    beyond = CALIBRATION | {"beyond_half": ["layers.0.blocks.0.add1_residual_input_quantizer"]}
    replace(card, calibration=beyond).write(file.with_suffix(".json"))
    found = bench_candidates([str(file)], ["cuda"], None, None, tmp_path, 1, "cuda").candidates
    on_engine = [one for one in found if one.name.startswith("cuda")]
    assert [one.name for one in on_engine] == ["cuda bfloat16", "cuda int8 cuda"]
    assert {one.baseline for one in on_engine} == {"cuda bfloat16"}


def test_a_checkpoint_is_not_tried_on_other_engines(names, first):
    with pytest.raises(UsageError, match="engine tensorrt: a checkpoint is tried on onnxruntime, openvino"):
        names([str(first)], ["tensorrt"])


@pytest.mark.slow
def test_models_of_two_checkpoints_are_not_compared(names, exported, checkpoint):
    with pytest.raises(UsageError, match="must be made from one checkpoint"):
        names([*exported, str(checkpoint(1))])
