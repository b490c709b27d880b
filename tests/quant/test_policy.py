"""The nodes that a policy enables, and their settings; built-in policies against FasterTransformer's own lists."""

import re
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.config import find_config, load_config
from swin_quant.models import build_model
from swin_quant.quant import INT8_MODES
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.layer import QuantLinear
from swin_quant.quant.policy import (
    Policy,
    Rule,
    apply_policy,
    decide,
    dequantize,
    enabled_nodes,
    load_policy,
    policy_from_dict,
    quantize,
)
from swin_quant.quant.quantizer import Role, Setting, State, named_nodes

# FasterTransformer's disable lists, searched in dotted names; docs/reference, section 1.5.
ALWAYS_OFF = ("final_input", "layernorm_input", "softmax_input", "local_input", "residual_input")
OFF = {1: ALWAYS_OFF, 2: (*ALWAYS_OFF, "[2n]._aftergemm")}

FAMILIES = {  # config: (mode 1, mode 2, qdq): 3 GEMMs for 12 or 24 blocks, and 3 mergings for the last
    "swin_tiny_patch4_window7_224": (201, 186, 12 * 12 + 6),
    "swin_large_patch4_window7_224_22k": (393, 366, 24 * 12 + 6),
    "swinv2_tiny_patch4_window8_256": (225, 210, 12 * 12 + 6),
    "swinv2_large_patch4_window12_192_22k": (441, 414, 24 * 12 + 6),
}

# Inputs of the four linears, their weights, and the operands of q x k and a x v; docs/reference, section 1.4.
LINEARS = r"(attn\.(qkv|proj)|mlp\.fc[12]|downsample\.reduction)\._(input|weight)_quantizer$"
QDQ = {
    "swin": rf"{LINEARS}|attn\.matmul_[qkva]_input_quantizer$",
    "swinv2": rf"{LINEARS}|attn\.(mha_[qk]|matmul_[va])_input_quantizer$",
}


def test_zero_points_are_for_activations(tiny_model):
    model = tiny_model("swin")
    policy = load_policy("qdq").asymmetric("*.mlp.fc2._input_quantizer", "*.matmul_a_input_quantizer")
    assert policy.name == ("qdq *.mlp.fc2._input_quantizer=asymmetric *.matmul_a_input_quantizer=asymmetric")
    assert policy_from_dict(policy.to_dict(), "again") == policy
    apply_policy(model, policy)
    chosen = {name for name, node in enabled_nodes(model).items() if not node.setting.symmetric}
    assert chosen == {
        n for n in enabled_nodes(model) if n.endswith(("mlp.fc2._input_quantizer", "matmul_a_input_quantizer"))
    }
    apply_policy(model, policy.and_then(Rule(nodes=("*",), symmetric=True)))
    assert all(node.setting.symmetric for node in enabled_nodes(model).values())
    with pytest.raises(UsageError, match="rule 3: zero points are for activations, not for .*_weight_quantizer"):
        apply_policy(model, load_policy("qdq").asymmetric("*.mlp.fc2.*"))
    for value in ("no", 0):
        with pytest.raises(UsageError, match=f"symmetric must be true or false.*, not {value!r}"):
            policy_from_dict({"name": "x", "rules": [{"enable": "*", "symmetric": value}]}, "x")
    with pytest.raises(UsageError, match="symmetric, amax are for enable and nodes"):
        policy_from_dict({"name": "x", "rules": [{"disable": "*", "symmetric": False}]}, "x")


def test_cpu_has_a_zero_point_behind_gelu(tiny_model):
    for name in ("cpu", "cpu-amx", "onnxruntime"):
        model = tiny_model("swinv2")
        apply_policy(model, load_policy(name))
        asymmetric = {name for name, node in enabled_nodes(model).items() if not node.setting.symmetric}
        assert asymmetric == {name for name in enabled_nodes(model) if name.endswith("mlp.fc2._input_quantizer")}
        assert asymmetric and load_policy(name).has_zero_points


def test_the_hashes_of_policies_are_stable():
    """A key that a policy does not use does not change its hash."""
    assert {name: load_policy(name).sha256[:8] for name in ("ft-mode1", "ft-mode2", "qdq", "tensorrt")} == {
        "ft-mode1": "def83b00",
        "ft-mode2": "56eaaca2",
        "qdq": "8ab8e8ab",
        "tensorrt": "5a8f76a2",
    }


def test_ranges_without_a_lower_end_are_refused_by_name(tiny_model):
    model = tiny_model("swin")
    calibrate(model, [torch.randn(2, 3, 32, 32)], Method("max"))
    nodes = named_nodes(model)
    nodes["layers.0.blocks.0.mlp.fc2._input_quantizer"].bounds = None
    apply_policy(model, load_policy("qdq"))
    quantize(model)
    apply_policy(model, load_policy("qdq").asymmetric("*.mlp.fc2._input_quantizer"))
    with pytest.raises(
        SwinQuantError, match="lower end.*layers.0.blocks.0.mlp.fc2._input_quantizer; calibrate"
    ) as caught:
        quantize(model)
    assert caught.value.args[0].startswith("1 of ") and all(node.state is State.OFF for node in nodes.values())


@pytest.fixture(scope="module")
def meta_model():
    made = {}

    def make(name):
        if name not in made:
            with torch.device("meta"):
                made[name] = build_model(load_config(find_config(name)))
        return made[name]

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_the_int8_modes_are_fastertransformers(name, meta_model, use_policy):
    model = meta_model(name)
    for mode, policy in INT8_MODES.items():
        use_policy(model, policy)
        enabled = set(enabled_nodes(model))
        assert enabled == {node for node in named_nodes(model) if not any(re.search(p, node) for p in OFF[mode])}
        assert len(enabled) == FAMILIES[name][mode - 1]
        assert {node.setting for node in enabled_nodes(model).values()} == {Setting(enabled=True)}


@pytest.mark.parametrize("name", FAMILIES)
def test_qdq_is_gemm_and_matmul_inputs_with_rows_of_weights(name, meta_model, use_policy):
    model = use_policy(meta_model(name), "qdq")
    enabled = enabled_nodes(model)
    assert set(enabled) == {node for node in named_nodes(model) if re.search(QDQ[name.split("_")[0]], node)}
    assert len(enabled) == FAMILIES[name][2]
    for node_name, node in enabled.items():
        assert node.setting.per_channel == node_name.endswith("_weight_quantizer") and node.setting.bits == 8


def test_policies_replace_each_other_entirely(tiny_model, use_policy):
    model = tiny_model("swin")
    alone = {}
    for name in ("ft-mode1", "qdq", "float", "ft-mode2"):
        fresh = use_policy(tiny_model("swin"), name)
        alone[name] = [node.setting for node in named_nodes(fresh).values()]
        assert bool(enabled_nodes(fresh)) == (name != "float")
    for name in ("ft-mode1", "qdq", "float", "ft-mode2", "ft-mode1"):
        use_policy(model, name)
        assert [node.setting for node in named_nodes(model).values()] == alone[name]


ROLES = {
    "a.fc1._input_quantizer": Role.GEMM_INPUT,
    "a.fc1._weight_quantizer": Role.GEMM_WEIGHT,
    "a.fc1._aftergemm_quantizer": Role.GEMM_OUTPUT,
    "b.fc2._input_quantizer": Role.GEMM_INPUT,
    "b.fc2._weight_quantizer": Role.GEMM_WEIGHT,
}


def decided(*rules):
    return decide(policy_from_dict({"name": "test", "rules": list(rules)}, "test.yaml"), ROLES)


def test_later_rules_keep_what_they_do_not_mention():
    settings = decided(
        {"enable": "*", "bits": 4, "narrow_range": True},
        {"enable": "role:gemm_weight", "granularity": "per-channel"},
        {"enable": "a.*", "bits": 6},
        {"enable": "a.fc1._input_quantizer", "narrow_range": False},
    )
    weight = settings["a.fc1._weight_quantizer"]
    assert (weight.bits, weight.granularity, weight.narrow_range) == (6, "per-channel", True)
    other = settings["b.fc2._input_quantizer"]
    assert (other.bits, other.granularity, other.narrow_range) == (4, "per-tensor", True)
    assert not settings["a.fc1._input_quantizer"].narrow_range


def test_selectors_are_globs_roles_and_lists_of_them():
    settings = decided({"enable": ["role:gemm_output", "?.fc2.*"]})
    assert [name for name, s in settings.items() if s.enabled] == [
        "a.fc1._aftergemm_quantizer", "b.fc2._input_quantizer", "b.fc2._weight_quantizer",
    ]  # fmt: skip
    assert not any(s.enabled for s in decided({"disable": "*"}).values())


BAD_RULES = [
    ({"enable": "*.fc9.*"}, "'*.fc9.*'"),
    ({"enable": "*a" * 200}, "at most 300 characters"),
    ({"disable": "A.FC1*"}, "'A.FC1*'"),
    ({"enable": ["*", "nothing"]}, "'nothing'"),
    ({"enable": "role:softmax_input"}, "'role:softmax_input'"),
    ({"enable": "role:gemm"}, "'role:gemm'"),
    ({"enable": "*", "disable": "a.fc1.*"}, "a.fc1._input_quantizer"),
    ({"enable": "role:gemm_weight", "disable": "b.fc2._weight_quantizer"}, "b.fc2._weight_quantizer"),
    ({"enable": "*", "bit": 8}, "'bit'"),
    ({"enable": "*", "bits": 1}, "is 1,"),
    ({"enable": "*", "bits": 17}, "is 17,"),
    ({"enable": "*", "granularity": "per-row"}, "is 'per-row'"),
    ({"enable": "*", "granularity": "per-channel"}, "a.fc1._input_quantizer"),
    ({"enable": "role:gemm_output", "granularity": "per-channel"}, "a.fc1._aftergemm_quantizer"),
    ({"enable": "*", "narrow_range": "yes"}, "not 'yes'"),
    ({"enable": "*", "amax": 0.0}, "amax"),
    ({"enable": "*", "format": "fp4"}, "int8, fp8"),
    ({"enable": 3}, "enable"),
    ({"enable": []}, "names no node"),
    ({"bits": 4}, "names no node"),
    ({}, "names no node"),
    ("*", "mapping"),
    (None, "mapping"),
]


@pytest.mark.parametrize(("rule", "words"), BAD_RULES, ids=[str(rule) for rule, _ in BAD_RULES])
def test_a_bad_rule_is_a_usage_error_that_names_it(rule, words):
    with pytest.raises(UsageError) as caught:
        decided({"enable": "*"}, rule)
    message = str(caught.value)
    assert words in message and "rule 2" in message and "test" in message and "\n" not in message


def test_a_selector_without_a_node_is_answered_with_where_nodes_are():
    with pytest.raises(UsageError, match=r"names no node of this model, whose nodes are in a, .*: `swin-quant show"):
        decided({"enable": "nothing.*"})
    with pytest.raises(UsageError, match=r"names no node of this model; did you mean b.fc2.\*\?"):
        decided({"enable": "bb.fc2.*"})


FP8, WEIGHT, INPUT = {"format": "fp8"}, {"nodes": "role:gemm_weight"}, {"nodes": "*._input_quantizer"}
CLASHES = [
    (WEIGHT | {"block": 32}, "a.fc1._weight_quantizer: blocks are parts of the rows of weights"),
    (INPUT | {"block": 32}, "a.fc1._input_quantizer: blocks are parts of the rows of"),
    (WEIGHT | {"amax": 1.0}, "a.fc1._weight_quantizer: a fixed amax is for activations"),
    (INPUT | {"amax": 1.0, "symmetric": False}, "a.fc1._input_quantizer: a fixed amax is for activations"),
    (INPUT | FP8 | {"bits": 4}, "a.fc1._input_quantizer: format fp8 has 8 bits, not 4"),
    (INPUT | FP8 | {"symmetric": False}, "a.fc1._input_quantizer: format fp8 has no zero point"),
    (WEIGHT | FP8 | {"narrow_range": True}, "a.fc1._weight_quantizer: format fp8 has no narrow range"),
    (WEIGHT | FP8 | {"granularity": "per-channel", "block": 32}, "a.fc1._weight_quantizer: format fp8 has no blocks"),
]


@pytest.mark.parametrize(("rule", "says"), CLASHES)
def test_impossible_settings_are_refused_with_the_node(rule, says):
    with pytest.raises(UsageError, match=f"^policy test: {says}"):
        decided({"enable": "*"}, rule)


BAD_POLICIES = [
    (None, "mapping"),
    ("ft-mode1", "mapping"),
    ({"name": "x"}, "rules"),
    ({"name": "x", "rules": []}, "rules"),
    ({"name": "x", "rules": {"enable": "*"}}, "rules"),
    ({"rules": [{"enable": "*"}]}, "name"),
    ({"name": 3, "rules": [{"enable": "*"}]}, "name"),
    ({"name": "x", "rules": [{"enable": "*"}], "rule": []}, "'rule'"),
    ({"name": "x", "rules": [{"enable": "*"}], 3: []}, "'3'"),
]


@pytest.mark.parametrize(("data", "words"), BAD_POLICIES, ids=[str(data) for data, _ in BAD_POLICIES])
def test_a_bad_policy_is_a_usage_error_that_names_the_key(data, words):
    with pytest.raises(UsageError, match="^my.yaml") as caught:
        policy_from_dict(data, "my.yaml")
    assert words in str(caught.value)


SELECTORS = st.sampled_from(["*", "a.*", "*_weight_quantizer", "role:gemm_input", "role:gemm_weight"])
RULES = st.builds(
    Rule,
    enable=st.lists(SELECTORS, min_size=1, max_size=3).map(tuple),
    disable=st.lists(SELECTORS, max_size=2).map(tuple),
    bits=st.none() | st.integers(2, 8),
    granularity=st.none() | st.sampled_from(["per-tensor", "per-channel"]),
    narrow_range=st.none() | st.booleans(),
)


@given(st.builds(Policy, st.text("abc-", min_size=1), st.lists(RULES, min_size=1).map(tuple), st.just("about it")))
def test_policies_go_to_plain_data_and_back(policy):
    assert policy_from_dict(policy.to_dict(), "there and back") == policy


@pytest.fixture(scope="module")
def calibrated(tiny_model):
    def make(kind="swin"):
        model = tiny_model(kind)
        calibrate(model, [torch.randn(2, 3, 32, 32)], Method("max"))
        return model

    return make


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_a_policy_derives_ranges_and_writes_none(kind, calibrated, use_policy):
    model = calibrated(kind)
    silent = model.layers[0].blocks[0].mlp.fc1
    silent.weight.data[3] = 0
    learned = model.layers[1].blocks[0].mlp.fc2._weight_quantizer
    learned.amax = 0.301
    before = {key: value.clone() for key, value in model.state_dict().items()}
    use_policy(model, "qdq")
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, QuantLinear)]
    assert len(layers) == 3 * 4 + 1
    for name, layer in layers:
        node, rows = layer._weight_quantizer, layer.weight.abs().amax(1, keepdim=True)
        amax, stored = node.range_for(layer.weight), before[f"{name}._weight_quantizer._amax"]
        assert amax.shape == (layer.out_features, 1) and amax.dtype == torch.float32
        assert torch.equal(amax, torch.where(rows > 0, rows, stored).minimum(stored))
    assert silent._weight_quantizer.range_for(silent.weight)[3] == silent._weight_quantizer.amax
    use_policy(model, "ft-mode1")
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
    assert learned.amax == torch.tensor(0.301)


def test_quantize_switches_on_what_is_enabled_and_only_that(calibrated, use_policy):
    model = use_policy(calibrated(), "ft-mode2")
    assert {node.state for node in named_nodes(model).values()} == {State.OFF}
    quantize(model)
    enabled = set(enabled_nodes(model))
    for name, node in named_nodes(model).items():
        assert node.state is (State.QUANTIZE if name in enabled else State.OFF)
    x = torch.randn(2, 3, 32, 32)
    quantized = model(x)
    dequantize(model)
    assert {node.state for node in named_nodes(model).values()} == {State.OFF} and set(enabled_nodes(model)) == enabled
    assert not torch.equal(model(x), quantized)
    quantize(model)
    use_policy(model, "qdq")
    assert {node.state for node in named_nodes(model).values()} == {State.OFF}


def test_quantizing_without_ranges_names_the_nodes_and_changes_nothing(calibrated, use_policy):
    model = use_policy(calibrated(), "ft-mode1")
    nodes = named_nodes(model)
    for name, node in nodes.items():
        if "softmax_input" in name:  # not enabled: it needs none
            node.amax = None
    quantize(model)
    dequantize(model)
    missing = ["layers.0.blocks.0.attn.proj._input_quantizer", "layers.1.blocks.0.mlp.fc2._weight_quantizer"]
    for name in missing:
        nodes[name].amax = None
    with pytest.raises(SwinQuantError) as caught:
        quantize(model)
    message = str(caught.value)
    assert all(name in message for name in missing) and message.startswith("2 of ") and "\n" not in message
    assert {node.state for node in nodes.values()} == {State.OFF}


def test_bits_reach_the_arithmetic(calibrated):
    model = calibrated()
    layer = model.layers[0].blocks[0].mlp.fc1
    rule = {"enable": "*.mlp.fc1._weight_quantizer", "bits": 3, "narrow_range": True}
    apply_policy(model, policy_from_dict({"name": "three", "rules": [rule]}, "here"))
    quantize(model)
    levels = Counter((layer._weight_quantizer(layer.weight) / layer.weight.abs().max() * 3).round().flatten().tolist())
    assert set(levels) == {-3, -2, -1, 0, 1, 2, 3}
