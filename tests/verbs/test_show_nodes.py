"""swin-quant show of a model: every node with its state, bits, range and shape, in three formats."""

import json

import pytest
import torch

FIELDS = ["node", "role", "state", "format", "bits", "granularity", "grid", "amax", "low", "high", "shape"]
# Nodes in 3 blocks and 1 patch merging, counted from docs/reference, sections 1.3 and 1.5.
TOTAL = {"swin": 3 * 23 + 3, "swinv2": 3 * 25 + 3}
ENABLED = {
    ("swin", "ft-mode1"): 3 * 16 + 3,
    ("swin", "ft-mode2"): 3 * 15 + 2,
    ("swinv2", "ft-mode1"): 3 * 18 + 3,
    ("swinv2", "ft-mode2"): 3 * 17 + 2,
    ("swin", "qdq"): 3 * (2 * 4 + 4) + 2,
    ("swinv2", "qdq"): 3 * (2 * 4 + 4) + 2,
    ("swin", "float"): 0,
    ("swinv2", "float"): 0,
}


@pytest.fixture
def nodes(run, micro):
    """nodes("swin", flags ...) -> {node: row} from the JSON."""

    def go(kind, *flags):
        done = run("show", "--cfg", micro / f"{kind}.yaml", "--json", "-", *flags)
        assert done.code == 0 and done.err == "", done
        rows = json.loads(done.out)
        assert all(list(row) == FIELDS for row in rows)
        return {row["node"]: row for row in rows}

    return go


@pytest.mark.parametrize(("kind", "policy"), ENABLED)
def test_counts_under_each_policy(nodes, kind, policy):
    rows = nodes(kind, "--policy", policy)
    assert len(rows) == TOTAL[kind]
    assert sum(row["state"] == "on" for row in rows.values()) == ENABLED[kind, policy]
    assert {row["amax"] for row in rows.values()} == {None}


def test_a_calibrated_checkpoint_brings_the_policy_of_its_card(nodes, calibrated):
    rows = nodes("swin", "--checkpoint", calibrated)
    assert sum(row["state"] == "on" for row in rows.values()) == ENABLED["swin", "ft-mode1"]


def test_shapes_are_those_of_one_picture(nodes):
    """8 x 8 tokens of 16 channels in 4 windows of 16; then 4 x 4 tokens of 32 channels in one window, two heads."""
    shape = {name: row["shape"] for name, row in nodes("swin").items()}
    first, second, merging = "layers.0.blocks.1.", "layers.1.blocks.0.", "layers.0.downsample.reduction."
    assert shape[first + "layernorm_input1_quantizer"] == shape[first + "add2_local_input_quantizer"] == "1x64x16"
    assert shape[first + "attn.qkv._weight_quantizer"] == "48x16"
    assert shape[first + "attn.qkv._aftergemm_quantizer"] == "4x16x48"
    assert shape[first + "attn.softmax_input_quantizer"] == "4x1x16x16"
    assert shape[first + "mlp.fc2._input_quantizer"] == "1x64x64"
    assert shape[merging + "_input_quantizer"] == "1x16x64" and shape[merging + "_weight_quantizer"] == "32x64"
    assert shape[second + "attn.matmul_q_input_quantizer"] == "1x2x16x16"
    assert shape[second + "mlp.fc1._aftergemm_quantizer"] == "1x16x128"
    v2 = {name: row["shape"] for name, row in nodes("swinv2").items()}
    assert v2[second + "attn.mha_q_input_quantizer"] == "1x2x16x16"
    assert v2[merging + "_aftergemm_quantizer"] == "1x16x32"
    assert shape == {name: value for name, value in v2.items() if ".mha_" not in name}


def test_the_table_has_every_node_on_one_line_and_counts(run, nodes, micro):
    lines = run("show", "--cfg", micro / "swin.yaml", "--policy", "ft-mode1").out.splitlines()
    assert lines[0].split() == [name for name in FIELDS if name not in ("low", "high")]
    assert [line.split()[0] for line in lines[1 : TOTAL["swin"] + 1]] == list(nodes("swin"))
    assert "51 of 72 nodes are on" in lines[-1]


def test_zero_points_show_both_ends(nodes, calibrated, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nrules:\n- enable: role:gemm_input\n- nodes: '*.mlp.fc2._input_quantizer'\n  symmetric: false\n"
    )
    state = torch.load(calibrated, weights_only=True)
    for name, row in nodes("swin", "--checkpoint", calibrated, "--policy", tmp_path / "mine.yaml").items():
        if name.endswith("mlp.fc2._input_quantizer"):
            assert row["grid"] == "zero point" and [row["low"], row["high"]] == state[f"{name}._bounds"].tolist()
            assert -0.18 < row["low"] < 0 < row["high"]  # the output of GELU
        else:
            assert row["grid"] == "symmetric" and row["low"] is row["high"] is None


def test_a_policy_of_the_user_s(run, nodes, micro, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nrules:\n  - enable: role:gemm_weight\n    granularity: per-channel\n    bits: 3\n"
        "  - disable: layers.1.*\n"
    )
    on = {name: row for name, row in nodes("swin", "--policy", path).items() if row["state"] == "on"}
    assert len(on) == 2 * 4 + 1 and all(name.endswith("_weight_quantizer") for name in on)
    assert {(row["bits"], row["granularity"]) for row in on.values()} == {(3, "per-channel")}
    path.write_text("name: mine\nrules:\n  - enable: layers.9.*\n")
    words = ("show", "--cfg", micro / "swin.yaml", "--policy", path)
    line = run(*words).error(2)
    assert "policy mine: rule 1" in line and "layers.9.*" in line
    line = run(*words[:-1], "qdq", "ft-mode1").error(2)
    assert "--policy qdq ft-mode1: give one" in line
