"""Models beyond the kernels' limits are refused with the reason, before anything is written."""

from dataclasses import replace

import pytest
import torch
from cards_of_results import CALIBRATION

from swin_quant.backends.fastertransformer.export import FasterTransformerOptions, export
from swin_quant.backends.fastertransformer.limits import check_limits, list_warnings
from swin_quant.backends.fastertransformer.slots import Case
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import configs_dir
from swin_quant.cards.card import RunCard
from swin_quant.config import find_config, load_config
from swin_quant.models.geometry import read_geometry
from swin_quant.quant.policy import load_policy, policy_from_dict

LARGE = "swin_large_patch4_window7_224_22kto1k_finetune"
NARROW = {"embed_dim": 32, "heads": (1, 2, 4, 8)}  # 7 x 7 tokens of 256 channels in the last stage


def geometry(name="swin_tiny_patch4_window7_224", **keys):
    return replace(read_geometry(load_config(find_config(name))), **keys)


def case(g=None, version=1, kind="int8", sm=80, mode=1, fix=False, batch=128):
    return Case(g or geometry(), version, kind, sm, fix, mode, batch)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (case(geometry(ape=True)), "APE"),
        (case(geometry(qkv_bias=False)), "QKV_BIAS False"),
        (case(geometry(qkv_bias=False), kind="float16"), "QKV_BIAS False"),
        (case(geometry(patch_norm=False)), "PATCH_NORM False"),
        (case(geometry("swin_tiny_c24_patch4_window8_256")), "head width 24"),
        (case(geometry(heads=(3, 3, 12, 24))), "takes the head's width of stage 0"),
        (case(geometry(embed_dim=48, heads=(1, 2, 4, 8))), "head width 48"),
        (case(geometry(mlp_ratio=3.9)), "MLP_RATIO 3.9"),
        (case(version=2, mode=2), "kernels ignore mode 2"),
        (case(sm=70), "compute capability 75"),
        (case(sm=120), "sm 120"),
        (case(kind="bfloat16"), "kind bfloat16"),
        (case(geometry(window=33)), "windows of up to 32"),
        (case(geometry(window=18)), "packed for at most 256 tokens"),
        (case(geometry(qk_scale=0.3)), "fused INT8 attention ignores it"),
        (case(geometry(qk_scale=1.0), sm=89), "means the default"),
        (case(geometry("swinv2_base_patch4_window12to24_192to384_22kto1k_ft"), 2, sm=75), "normalizes k"),
        (case(geometry(embed_dim=352, heads=(11, 22, 44, 88))), "11264 hidden channels"),
        (case(fix=True), "fix_gelu_bias: it has 3072 hidden channels at most"),
        (case(geometry(LARGE), kind="float16", fix=True), "fix_gelu_bias: only the INT8 kernel"),
        (case(geometry(**NARROW), batch=3), "batch 3: the norm after attention computes rows in fours in layers.3 "),
        (case(batch=0), "batch 0"),
    ],
)
def test_what_they_cannot_do(wrong, says):
    with pytest.raises(UsageError, match=says) as error:
        check_limits(wrong)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "right",
    [
        *(case(sm=sm) for sm in (75, 80, 86, 89, 90)),
        *(case(geometry("swinv2_tiny_patch4_window16_256"), 2, sm=sm) for sm in (75, 80, 86, 89, 90)),
        case(geometry("swin_tiny_c24_patch4_window8_256"), kind="float16"),
        case(geometry(qk_scale=0.3), sm=89),
        case(geometry(qk_scale=32**-0.5)),
        case(geometry(window=18), sm=89),
        case(geometry("swinv2_base_patch4_window12to24_192to384_22kto1k_ft"), 2, sm=80),
        case(sm=70, kind="float32", mode=None),
        case(geometry(LARGE), fix=True),
        case(geometry(embed_dim=352, heads=(11, 22, 44, 88)), kind="float16"),
        case(geometry(**NARROW), batch=4),
        case(geometry(**NARROW), version=2, batch=1),
        case(geometry(**NARROW), kind="float16", batch=1),
    ],
)
def test_what_only_looks_like_it(right):
    check_limits(right)


@pytest.mark.parametrize("file", sorted(path.stem for path in configs_dir().glob("swin*/[!_]*.yaml")))
def test_of_the_published_models_only_large_ones_are_warned_of(file):
    """docs/reference, section 3.9: fc1's bias beyond channel 4096; none loses rows."""
    version = 2 if file.startswith("swinv2") else 1
    warnings = list_warnings(case(geometry(file), version))
    assert [w[:21] for w in warnings] == (["6144 hidden channels:"] if "_large_" in file else [])
    assert list_warnings(case(geometry(file), version, kind="float16")) == []


def test_rows_that_are_lost_are_warned_of():
    (warning,) = list_warnings(case(geometry(**NARROW)))
    assert "in layers.3 (at most 256 channels" in warning and "that 4 does not divide" in warning
    wide = case(geometry(**NARROW | {"embed_dim": 64, "heads": (2, 4, 8, 16)}))
    assert list_warnings(case(geometry(**NARROW), version=2)) == list_warnings(wide) == []


@pytest.mark.parametrize(
    ("policy", "says"),
    [("qdq", "policy qdq: .* ft-mode1 and ft-mode2 only"), ("float", "policy float"), (None, "needs a policy")],
)
def test_policies_that_no_kernel_runs(calibrated, tmp_path, policy, says):
    card = RunCard("micro", {}, {}, policy=load_policy(policy).to_dict() if policy else None)
    with pytest.raises(UsageError, match=says):
        export(calibrated(), card, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_policy_is_known_by_what_it_does_not_by_its_name(exported, calibrated, card, tmp_path):
    own = load_policy("ft-mode2").to_dict() | {"name": "mine"}
    made = export(calibrated(), replace(card(), policy=own), tmp_path / "own")
    assert made.record["options"]["int8_mode"] == 2
    four_bits = load_policy("ft-mode1").to_dict()
    four_bits["rules"].append({"nodes": "role:gemm_weight", "bits": 4})
    assert policy_from_dict(four_bits, "test").name == "ft-mode1"
    zero_points = load_policy("ft-mode1").asymmetric("*.mlp.fc2._input_quantizer").to_dict()
    with pytest.raises(UsageError, match=r"policy .*: FasterT.* it differs in layers.0.blocks.0.mlp.fc2._input_quan"):
        export(calibrated(), replace(card(), policy=zero_points), tmp_path / "zero")
    with pytest.raises(UsageError, match="it differs in layers.0.blocks.0.attn.qkv._weight_quantizer"):
        export(calibrated(), replace(card(), policy=four_bits), tmp_path / "four")


def test_a_range_of_zero_is_named(calibrated, card, tmp_path):
    for layer, amax in (("fc2._input", 0.0), ("fc1._aftergemm", None)):
        model, node = calibrated(), f"layers.0.blocks.1.mlp.{layer}_quantizer"
        model.get_submodule(node).amax = amax
        with pytest.raises(SwinQuantError, match=f"{node}; calibrate the model"):
            export(model, card(), tmp_path)


def test_values_beyond_float16(calibrated, card, tmp_path):
    model = calibrated()
    model.layers[0].blocks[1].mlp.fc2._input_quantizer.amax = 1e-3
    with pytest.raises(SwinQuantError, match=r"range too small for float16 in layers.0.blocks.1.mlp.fc2"):
        export(model, card(), tmp_path)
    model = calibrated()
    torch.nn.init.constant_(model.layers[0].blocks[0].norm1.bias, 1e5)
    with pytest.raises(SwinQuantError, match="layers.0.blocks.0.norm1.bias has values beyond float16"):
        export(model, card(), tmp_path)
    node = "layers.1.blocks.0.add2_residual_input_quantizer"
    overflowing = replace(card(), calibration=CALIBRATION | {"beyond_half": [node]})
    with pytest.raises(SwinQuantError, match=f"beyond float16 .* in {node}"):
        export(calibrated(), overflowing, tmp_path)
    export(calibrated(), overflowing, tmp_path, FasterTransformerOptions("float", "float32"))
