"""Policies by name and from users' files, good and bad."""

import json
from dataclasses import replace

import pytest

from swin_quant.base.errors import UsageError
from swin_quant.quant.policy import (
    Policy,
    Rule,
    builtin_policies,
    described,
    enabled_nodes,
    is_builtin,
    load_policy,
    policy_from_dict,
    told_apart,
)

DEEP = {"DEPTHS": [1, 1, 1, 2], "NUM_HEADS": [1, 2, 4, 8]}
MINE = """
name: mine
description: four bits for the weights of the last stage
rules:
  - enable: "layers.3.*_weight_quantizer"
    bits: 4
    granularity: per-channel
  - disable: ["*.mlp.fc2.*", "*.attn.proj.*"]
"""


@pytest.mark.parametrize("name", ["mine.yaml", "mine.yml"])
def test_a_file_of_the_user(name, tmp_path, tiny_model, use_policy):
    (tmp_path / name).write_text(MINE)
    policy = load_policy(str(tmp_path / name))
    assert policy.name == "mine" and policy.description.startswith("four bits")
    nodes = enabled_nodes(use_policy(tiny_model("swin", **DEEP), str(tmp_path / name)))
    expected = {f"layers.3.blocks.{j}.{linear}._weight_quantizer" for j in (0, 1) for linear in ("attn.qkv", "mlp.fc1")}
    assert set(nodes) == expected and all(
        node.setting.bits == 4 and node.setting.per_channel for node in nodes.values()
    )


@pytest.mark.parametrize("name", ["ft-mode3", "../ft-mode1"])
def test_an_unknown_name_gets_a_hint(name):
    with pytest.raises(UsageError, match="did you mean ft-mode"):
        load_policy(name)


@pytest.mark.parametrize("text", ["rules: [", "- enable: '*'", "name: x"])
def test_a_bad_file_is_a_usage_error_that_names_it(text, tmp_path):
    """`tests/base` has more of what is no YAML."""
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_policy(str(path))
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and len(message) < len(str(path)) + 500


OTHER = Policy("cpu", (Rule(enable=("role:gemm_weight",)),))


def test_a_policy_is_its_rules():
    cpu = load_policy("cpu")
    assert replace(cpu, name="mine", description="of mine").sha256 == cpu.sha256 != load_policy("qdq").sha256
    again = policy_from_dict(json.loads(json.dumps(cpu.to_dict())), "here")
    assert again.sha256 == cpu.sha256 and is_builtin(again)
    assert not is_builtin(replace(cpu, name="mine")) and not is_builtin(OTHER)
    assert len({load_policy(name).sha256 for name in builtin_policies()}) == len(builtin_policies())


def test_a_changed_policy_with_a_built_in_name_is_shown_with_its_hash():
    assert described(load_policy("cpu")) == "cpu" and described(replace(OTHER, name="mine")) == "mine"
    assert described(OTHER) == f"cpu (mine {OTHER.sha256[:6]})"


def test_only_policies_with_the_same_name_are_shown_with_a_hash():
    cpu, mine = load_policy("cpu").sha256, OTHER.sha256
    assert told_apart([("cpu", mine), ("qdq", "1" * 64)]) == {("cpu", mine): "cpu", ("qdq", "1" * 64): "qdq"}
    both = {("cpu", cpu): "cpu", ("cpu", mine): f"cpu (mine {mine[:6]})", ("cpu", None): "cpu"}
    assert told_apart(list(both)) == both
    own = [("own", "1" * 64), ("own", "2" * 64)]
    assert list(told_apart(own).values()) == ["own (mine 111111)", "own (mine 222222)"]
