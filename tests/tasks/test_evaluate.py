"""What a checkpoint is scored as: its card's policy, those asked for, or float; and one card for all of it."""

import dataclasses
import shutil

import pytest
import torch

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.checkpoint import save_float
from swin_quant.config import find_config, load_config
from swin_quant.loading import load_for_scoring
from swin_quant.models import build_model
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import Rule, apply_policy
from swin_quant.quant.quantizer import State, named_nodes
from swin_quant.score.engine import half_type
from swin_quant.score.scoring import open_labelled, score_model
from swin_quant.score.torch_engines import precision_of, torch_engines
from swin_quant.verbs.calibrate import CalibrationPlan, calibrate_checkpoint

CPU = torch.device("cpu")
MODE1, MODE2, FLOAT = (load_policy(name) for name in ("ft-mode1", "ft-mode2", "float"))


@pytest.fixture(scope="module")
def cfg():
    return load_config(find_config("swin_digits"), overrides={"DATA.DATA_PATH": "digits", "MODEL.SWIN.EMBED_DIM": 8})


@pytest.fixture(scope="module")
def weights(cfg, randomise, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    save_float(randomise(build_model(cfg)), path)
    return str(path)


@pytest.fixture(scope="module")
def done(cfg, weights, tmp_path_factory):
    return calibrate_checkpoint(cfg, weights, MODE1, CalibrationPlan(batches=1), tmp_path_factory.mktemp("done"))


def test_a_float_checkpoint_has_no_policy(cfg, weights):
    subject = load_for_scoring(cfg, weights)
    assert subject.policies == [] and subject.card_file is None and subject.card.source["file"] == "weights.pth"


def test_a_calibrated_one_has_that_of_its_card_unless_asked_otherwise(cfg, done):
    subject = load_for_scoring(cfg, str(done.checkpoint))
    assert subject.policies == [MODE1] and subject.card_file == done.checkpoint.with_suffix(".json")
    assert load_for_scoring(cfg, str(done.checkpoint), [MODE2, FLOAT]).policies == [MODE2, FLOAT]


def test_the_float_policy_needs_no_range(cfg, weights, done, tmp_path):
    assert load_for_scoring(cfg, weights, [FLOAT]).policies == [FLOAT]
    alone = shutil.copy(done.checkpoint, tmp_path / "alone.pth")
    assert load_for_scoring(cfg, str(alone), [FLOAT]).policies == [FLOAT]
    with pytest.raises(UsageError, match="alone.pth: is calibrated but has no run card"):
        load_for_scoring(cfg, str(alone))
    with pytest.raises(SwinQuantError, match="never calibrated"):
        load_for_scoring(cfg, weights, [FLOAT, MODE1])


def test_engines_are_float_then_half_then_each_policy_that_enables_a_node(done):
    engines = torch_engines(done.module, CPU, "bfloat16", [MODE1, FLOAT, MODE2])
    assert list(engines) == ["float32", "bfloat16", "int8 ft-mode1", "int8 ft-mode2"]
    images = torch.randn(2, 3, 32, 32)
    first = {label: engine(images).float() for label, engine in engines.items()}
    assert {node.state for node in named_nodes(done.module).values()} == {State.OFF}
    for label in reversed(engines):  # in any order: no engine leaves anything behind in the model they share
        assert torch.equal(engines[label](images).float(), first[label])
    assert len({tuple(logits.flatten().tolist()) for logits in first.values()}) == 4


def test_a_policy_that_wants_ranges_the_model_lacks_is_refused_before_any_picture(cfg):
    with pytest.raises(SwinQuantError, match="enabled nodes have no range .*: layers.0"):
        torch_engines(build_model(cfg), CPU, None, [MODE1])


@pytest.mark.parametrize(
    ("rules", "precision"),
    [
        ([], "int8"),
        ([Rule(nodes=("role:gemm_weight",), bits=4)], "W4A8"),
        ([Rule(nodes=("role:activation",), bits=6)], "W8A6"),
        ([Rule(nodes=("layers.0.*",), bits=4)], "mixed"),
        ([Rule(disable=("role:activation",))], "int8"),
        ([Rule(disable=("role:activation",)), Rule(nodes=("role:gemm_weight",), bits=4)], "W4A32"),
    ],
)
def test_precision_names_bits_of_weights_and_activations(done, rules, precision):
    apply_policy(done.module, MODE1.and_then(*rules))
    assert precision_of(done.module) == precision
    apply_policy(done.module, MODE1)


def test_half_types():
    assert half_type("auto", CPU) == "bfloat16" and half_type("auto", torch.device("cuda")) == "float16"
    assert half_type("none", CPU) is None and half_type("float16", CPU) == "float16"
    with pytest.raises(UsageError, match="half int4"):
        half_type("int4", CPU)


def test_a_score_adds_results_to_a_copy_of_the_card(cfg, done):
    card = score_model(done.module, cfg, done.card, [MODE1], half="none")
    assert [result.policy for result in card.measured()] == [None, "ft-mode1"] and done.card.results == []
    float32, int8 = card.measured()
    assert float32.pictures == int8.pictures == int8.dataset["pictures"] == 355
    assert int8.delta_acc1 == pytest.approx(int8.acc1 - float32.acc1) and float32.delta_acc1 is None
    assert int8.dataset == {"name": "digits", "split": "val", "pictures": 355, "sha256": float32.dataset["sha256"]}
    assert dataclasses.replace(card, results=[]) == done.card


def test_labelled_pictures_have_the_model_s_number_of_classes(cfg):
    eleven = load_config(find_config("swin_digits"), overrides={"DATA.DATA_PATH": "digits", "MODEL.NUM_CLASSES": 11})
    assert len(open_labelled(cfg, "val", World())) == 355
    with pytest.raises(SwinQuantError, match="10 classes, but MODEL.NUM_CLASSES is 11"):
        open_labelled(eleven, "val", World())
