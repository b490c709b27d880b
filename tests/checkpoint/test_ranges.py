"""A policy with other bits than the ranges: refused if they depend on the bits, else a warning."""

import functools

import pytest
from cards_of_results import CALIBRATION, TRAINING

from swin_quant.base.errors import UsageError
from swin_quant.cards.card import RunCard
from swin_quant.checkpoint.ranges import Origin, bits_record, check_bits, origins
from swin_quant.quant.calibration import Method
from swin_quant.quant.policy import Rule, apply_policy, load_policy
from swin_quant.quant.quantizer import Role, named_nodes
from tests.helpers.refusals import refused

ONE = "layers.0.blocks.0.mlp.fc2._input_quantizer"


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(DEPTHS=[1, 1], NUM_HEADS=[1, 2])


def policy(weights=8, activations=8, name="ft-mode1"):
    rules = Rule(nodes=("role:gemm_weight",), bits=weights), Rule(nodes=("role:activation",), bits=activations)
    return load_policy(name).and_then(*rules)


def card(method="mse", policy=policy(), ranges=None, bits=8, **calibration):
    record = CALIBRATION | {"method": method, "bits": bits, "other_bits": {}} | calibration
    training = TRAINING | {"ranges": ranges} if ranges else None
    return RunCard("x", {}, {}, policy=policy.to_dict(), calibration=record, training=training)


def done(name, keeps_function=False, kept=True):
    measured = {"seconds": 1.0, "sqnr_db": [1.0, 2.0], "agreement": [1.0, 2.0]}
    return {"name": name, "options": {}, "note": "", "kept": kept, "keeps_function": keeps_function} | measured


INT8, INT4, FLOAT8 = load_policy("qdq"), policy(4, 4), load_policy("tensorrt-fp8")
LEARNED, ROUNDED = {"weights": "learned", "activations": "learned"}, {"passes": [done("gptq")]}
FIT = [
    *((card(method), one) for method in ("mse", "entropy") for one in (policy(), policy(8, 8, "qdq"), policy(4, 8))),
    *((card(method), policy(4, 8)) for method in ("percentile", "max")),  # weights have their maxima at any bits
    *((card(method, FLOAT8), FLOAT8) for method in ("mse", "entropy")),
    *((card(method, INT8), FLOAT8) for method in ("percentile", "max")),
    # After softmax tensorrt-fp8 fixes 1, while cuda-fp8, which leaves it float, found one for int8
    (card("mse", load_policy("cuda-fp8")), FLOAT8),
    *((card("percentile", INT4, LEARNED, bits=4), one) for one in (INT4, policy(4, 4, "qdq"))),
    *((card(**ROUNDED), one) for one in (policy(), policy(name="ft-mode2"))),
    *(
        (card(passes=[one]), policy(name="qdq"))
        for one in (done("range_search", keeps_function=True), done("bias_correction"), done("gptq", kept=False))
    ),
    (card("mse", policy(4, 8), **ROUNDED), policy(4, 8)),
    (card("mse", policy(4, 8), passes=[done("gptq", kept=False)]), policy(8, 8)),
    (None, policy()),
]


@pytest.mark.parametrize(("card", "policy"), FIT)
def test_ranges_that_fit_a_policy(model, card, policy, caplog):
    check_bits(model, card, [policy], "x.pth")
    assert not caplog.records


CALIBRATE, FINETUNE = "calibrate the float checkpoint with these bits", "finetune with these bits"
REFUSED = [
    *(
        row
        for method in ("mse", "entropy")
        for row in (
            (
                card(method),
                policy(8, 4),
                f"by {method} for 8 bits, and policy ft-mode1 has 4 bits at layers",
                CALIBRATE,
            ),
            (card(method, bits=4), policy(), "for 4 bits", CALIBRATE),
            # Float8's steps grow with the values: its best range is far wider for long tails
            (card(method, FLOAT8), INT8, f"by {method} for float8, and policy qdq has 8 bits at", CALIBRATE),
            (card(method, INT8), FLOAT8, f"by {method} for 8 bits, and policy tensorrt-fp8 has float8 at", CALIBRATE),
        )
    ),
    (
        card("percentile", INT8, LEARNED),
        FLOAT8,
        "are learned for 8 bits, and policy tensorrt-fp8 has float",
        FINETUNE,
    ),
    (card("percentile", INT4, LEARNED, bits=4), policy(8, 4), "learned for 4 bits", FINETUNE),
    (card("percentile", INT8, **ROUNDED), FLOAT8, "found by gptq for 8 bits", CALIBRATE),
    (card("mse", policy(4, 8), **ROUNDED), policy(8, 8), "found by gptq for 4 bits", CALIBRATE),
]


@pytest.mark.parametrize(("card", "policy", "problem", "remedy"), REFUSED)
def test_ranges_that_depend_on_another_grid_are_refused(model, card, policy, problem, remedy):
    check = functools.partial(check_bits, model, card, [load_policy("float"), policy], "x.pth")
    message = refused(check, problem, remedy, kind=UsageError)
    assert message.startswith("x.pth: ") and len(message) < 300


@pytest.mark.parametrize(
    ("card", "policy", "says"),
    [
        *(
            (card(method), INT4, [f"by {method} for 8 bits", "has 4", "`calibrate` with these bits"])
            for method in ("percentile", "max")
        ),
        (None, policy(4, 8), ["no run card", "4"]),
    ],
)
def test_what_is_usable_on_another_grid_is_warned_of(model, card, policy, says, caplog):
    check_bits(model, card, [policy], "x.pth")
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("x.pth: ") and "\n" not in message and all(words in message for words in says)


def test_qat_of_some_ranges_leaves_the_others_as_they_were_calibrated(model):
    made = card("mse", policy(4, 8), {"weights": "learned", "activations": None})
    found = origins(model, made)
    roles = {name: node.role for name, node in named_nodes(model).items()}
    enabled = "layers.0.blocks.0.mlp.fc1"
    assert found[f"{enabled}._weight_quantizer"] == Origin("learned", 4)
    assert found[f"{enabled}._input_quantizer"] == Origin("mse", 8)
    off = {name for name, role in roles.items() if role is Role.SOFTMAX_INPUT}
    assert {found[name] for name in off} == {Origin("percentile", 8)}, "what QAT left out it calibrated anew"


def test_what_a_calibration_records(model):
    apply_policy(model, policy(2, 4).and_then(Rule(nodes=(ONE,), bits=8)))
    by_default = {"bits": 4, "other_bits": {ONE: 8}, "methods": {"4": "mse", "8": "percentile"}}
    assert bits_record(model, Method()) == by_default
    apply_policy(model, policy())
    assert bits_record(model, Method("entropy")) == {"bits": 8, "other_bits": {}, "methods": {"8": "entropy"}}
