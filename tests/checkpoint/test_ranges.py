"""A policy with other bits than the ranges: refused if they depend on the bits, else a warning."""

import logging

import pytest
from cards_of_results import CALIBRATION, TRAINING

from swin_quant.base.errors import UsageError
from swin_quant.cards.card import RunCard
from swin_quant.checkpoint.ranges import Origin, bits_record, check_bits, origins
from swin_quant.quant.calibration import Method
from swin_quant.quant.policy import Rule, apply_policy, load_policy
from swin_quant.quant.quantizer import Role, named_nodes

ONE = "layers.0.blocks.0.mlp.fc2._input_quantizer"


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(DEPTHS=[1, 1], NUM_HEADS=[1, 2])


def policy(weights=8, activations=8, name="ft-mode1"):
    rules = Rule(nodes=("role:gemm_weight",), bits=weights), Rule(nodes=("role:activation",), bits=activations)
    return load_policy(name).and_then(*rules)


def card(method="mse", policy=policy(), ranges=None, **calibration):
    record = CALIBRATION | {"method": method} | calibration
    training = TRAINING | {"ranges": ranges} if ranges else None
    return RunCard("x", {}, {}, policy=policy.to_dict(), calibration=record, training=training)


def refused(model, card, *policies):
    with pytest.raises(UsageError) as caught:
        check_bits(model, card, policies, "x.pth")
    message = str(caught.value)
    assert message.startswith("x.pth: ") and "\n" not in message and len(message) < 300
    return message


def warned(model, card, *policies, caplog):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "swin_quant"):
        check_bits(model, card, policies, "x.pth")
    messages = [record.getMessage() for record in caplog.records]
    assert all(message.startswith("x.pth: ") and "\n" not in message for message in messages)
    return messages


@pytest.mark.parametrize("method", ["mse", "entropy"])
def test_ranges_that_depend_on_the_bits_are_for_these_bits(model, method, caplog):
    made = card(method, bits=8, other_bits={})
    assert warned(model, made, policy(), policy(8, 8, "qdq"), policy(4, 8), caplog=caplog) == []
    message = refused(model, made, policy(), policy(8, 4))
    assert f"by {method} for 8 bits, and policy ft-mode1 has 4 bits at layers.0" in message
    assert "calibrate the float checkpoint" in message
    assert "for 4 bits" in refused(model, card(method, bits=4, other_bits={}), policy())


@pytest.mark.parametrize("method", ["mse", "entropy"])
def test_ranges_that_depend_on_the_format_are_for_this_format(model, method, caplog):
    """Float8's steps grow with the values: its best range is far wider for long tails."""
    whole, float8 = load_policy("qdq"), load_policy("tensorrt-fp8")
    assert warned(model, card(method, policy=float8, bits=8), float8, caplog=caplog) == []
    to_int8 = refused(model, card(method, policy=float8, bits=8), whole)
    assert f"by {method} for float8, and policy qdq has 8 bits at" in to_int8
    to_float8 = refused(model, card(method, policy=whole, bits=8), float8)
    assert f"by {method} for 8 bits, and policy tensorrt-fp8 has float8 at" in to_float8
    for either in ("percentile", "max"):
        assert warned(model, card(either, policy=whole, bits=8), float8, caplog=caplog) == []


def test_a_node_whose_range_the_policy_says_needs_none(model, caplog):
    """After softmax tensorrt-fp8 fixes 1, while cuda-fp8, which leaves it float, found one for int8."""
    made = card("mse", policy=load_policy("cuda-fp8"), bits=8, other_bits={})
    assert warned(model, made, load_policy("tensorrt-fp8"), caplog=caplog) == []


def test_learned_ranges_and_rounded_weights_are_for_their_format(model, caplog):
    whole, float8 = load_policy("qdq"), load_policy("tensorrt-fp8")
    learned = card("percentile", whole, {"weights": "learned", "activations": "learned"}, bits=8, other_bits={})
    assert "learned for 8 bits, and policy tensorrt-fp8 has float8" in refused(model, learned, float8)
    rounded = card("percentile", whole, bits=8, other_bits={}, passes=[done("gptq")])
    assert "gptq for 8 bits" in refused(model, rounded, float8)
    assert "gptq rounded weights for other grids than policy tensorrt-fp8" in caplog.text


@pytest.mark.parametrize("method", ["percentile", "max"])
def test_ranges_that_do_not_are_used_with_one_line(model, method, caplog):
    made = card(method, bits=8, other_bits={})
    (message,) = warned(model, made, policy(4, 4), caplog=caplog)
    assert f"by {method} for 8 bits" in message and "has 4" in message and "`calibrate` with these bits" in message
    assert warned(model, made, policy(4, 8), caplog=caplog) == [], "weights have their maxima at any bits"


def test_learned_ranges_are_for_the_bits_that_they_were_learned_at(model, caplog):
    made = card("percentile", policy(4, 4), {"weights": "learned", "activations": "learned"}, bits=4, other_bits={})
    assert warned(model, made, policy(4, 4), policy(4, 4, "qdq"), caplog=caplog) == []
    message = refused(model, made, policy(8, 4))
    assert "by learned" not in message and "learned for 4 bits" in message and "finetune with these bits" in message


def done(name, keeps_function=False, kept=True):
    return {
        "name": name,
        "options": {},
        "note": "",
        "seconds": 1.0,
        "kept": kept,
        "keeps_function": keeps_function,
        "sqnr_db": [1.0, 2.0],
        "agreement": [1.0, 2.0],
    }


def test_weights_that_a_pass_rounded_are_for_the_granularity_of_its_policy(model, caplog):
    made = card(bits=8, other_bits={}, passes=[done("gptq")])
    assert warned(model, made, policy(), policy(name="ft-mode2"), caplog=caplog) == []
    (message,) = warned(model, made, policy(name="qdq"), caplog=caplog)
    assert "gptq rounded weights" in message and "policy qdq" in message and "calibrate" in message
    for one in (done("range_search", keeps_function=True), done("bias_correction"), done("gptq", kept=False)):
        made = card(bits=8, other_bits={}, passes=[one])
        assert warned(model, made, policy(name="qdq"), caplog=caplog) == []


def test_weights_that_a_pass_fitted_to_their_ranges_are_for_these_bits(model, caplog):
    gptq = done("gptq")
    made = card("mse", policy(4, 8), bits=8, other_bits={}, passes=[gptq])
    assert warned(model, made, policy(4, 8), caplog=caplog) == []
    message = refused(model, made, policy(8, 8))
    assert "found by gptq for 4 bits" in message and "calibrate the float checkpoint with these bits" in message
    taken_back = card("mse", policy(4, 8), bits=8, other_bits={}, passes=[gptq | {"kept": False}])
    assert warned(model, taken_back, policy(8, 8), caplog=caplog) == []


def test_qat_of_some_ranges_leaves_the_others_as_they_were_calibrated(model):
    made = card("mse", policy(4, 8), {"weights": "learned", "activations": None}, bits=8, other_bits={})
    found = origins(model, made)
    roles = {name: node.role for name, node in named_nodes(model).items()}
    enabled = "layers.0.blocks.0.mlp.fc1"
    assert found[f"{enabled}._weight_quantizer"] == Origin("learned", 4)
    assert found[f"{enabled}._input_quantizer"] == Origin("mse", 8)
    off = {name for name, role in roles.items() if role is Role.SOFTMAX_INPUT}
    assert {found[name] for name in off} == {Origin("percentile", 8)}, "what QAT left out it calibrated anew"


def test_without_a_card_8_bits_are_taken_for_granted_and_others_are_warned_of(model, caplog):
    assert warned(model, None, policy(), caplog=caplog) == []
    (message,) = warned(model, None, policy(4, 8), caplog=caplog)
    assert "no run card" in message and "4" in message


def test_what_a_calibration_records(model):
    apply_policy(model, policy(2, 4).and_then(Rule(nodes=(ONE,), bits=8)))
    by_default = {"bits": 4, "other_bits": {ONE: 8}, "methods": {"4": "mse", "8": "percentile"}}
    assert bits_record(model, Method()) == by_default
    apply_policy(model, policy())
    assert bits_record(model, Method("entropy")) == {"bits": 8, "other_bits": {}, "methods": {"8": "entropy"}}
