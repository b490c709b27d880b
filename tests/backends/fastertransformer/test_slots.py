"""The ops' lists: counts, order, shapes, and the element counts that the TensorRT plugin computes itself."""

import numpy as np
import pytest

from swin_quant.backends.fastertransformer.manifest import make_manifest
from swin_quant.backends.fastertransformer.slots import Case, slots
from swin_quant.backends.fastertransformer.weights import amax_list
from swin_quant.config import find_config, load_config
from swin_quant.models.geometry import read_geometry

V1, V2 = "swin_{}_patch4_window7_224", "swinv2_{}_patch4_window8_256"
LARGE_V2 = "swinv2_large_patch4_window12to16_192to256_22kto1k_ft"


def geometry(name):
    return read_geometry(load_config(find_config(name)))


def plugin(g, version, kind="int8", mode=1):
    return make_manifest("x", "x.safetensors", Case(g, version, kind, 80, False, mode, 32))["plugin"]


@pytest.mark.parametrize(
    ("name", "version", "int8", "float_"),
    [
        (V1.format("tiny"), 1, 218, 194),
        (V1.format("small"), 1, 410, 362),
        (V1.format("base"), 1, 410, 362),
        ("swin_large_patch4_window7_224_22k", 1, 410, 362),
        (V2.format("tiny"), 2, 230, 206),
        (V2.format("small"), 2, 434, 386),
        (V2.format("base"), 2, 434, 386),
        (LARGE_V2, 2, 434, 386),
    ],
)
def test_the_op_s_counts(name, version, int8, float_):
    """docs/reference, section 3.1: the only thing that the op checks."""
    g = geometry(name)
    assert len(slots(Case(g, version, "int8", 80))) == int8
    assert len(slots(Case(g, version, "float16", 80))) == len(slots(Case(g, version, "float32", 80))) == float_


def test_the_first_block_of_the_int8_list():
    """docs/reference, section 3.2, Swin-T."""
    block = slots(Case(geometry(V1.format("tiny")), 1, "int8", 80))[:16]
    c = 96
    kernel, half, host = ("int8", "cuda"), ("float16", "cuda"), ("float32", "cpu")
    expected = [
        (kernel, (3 * c, c)), (half, (3 * c,)), (kernel, (c * c,)), (half, (c,)), (kernel, (4 * c * c,)),
        (half, (4 * c,)), (kernel, (4 * c * c,)), (half, (c,)), (half, (c,)), (half, (c,)), (half, (c,)), (half, (c,)),
        (("float32", "cuda"), (96,)), (host, (96,)), (half, (3, 49, 49)), (half, (3, 64, 64)),
    ]  # fmt: skip
    assert [((slot.dtype, slot.device), slot.shape) for slot in block] == expected
    assert [slot.container for slot in block] == ["float16" if slot.dtype == "int8" else None for slot in block]
    assert [slot.name.removeprefix("layers.0.blocks.0.") for slot in block[:4]] == [
        "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias",
    ]  # fmt: skip


def test_the_end_of_the_list():
    found = slots(Case(geometry(V2.format("tiny")), 2, "int8", 80))
    keys, names = ([getattr(slot, word) for slot in found] for word in ("key", "name"))
    assert keys == sorted(set(keys)) and names[-12:] == [
        "layers.3.blocks.1.attn.logit_scale", "layers.3.downsample.norm.weight", "layers.3.downsample.norm.bias",
        "layers.3.downsample.reduction.weight", "layers.3.attn_mask", "layers.3.trt_attn_mask",
        "patch_embed.proj.weight", "patch_embed.proj.bias", "patch_embed.norm.weight", "patch_embed.norm.bias",
        "norm.weight", "norm.bias",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["int8", "float16", "float32"])
def test_the_types_of_empty_tensors(kind):
    """FasterTransformer's INT8 exporter appends torch.Tensor() where the last stage lacks a tensor, else
    HalfTensor()."""
    empty = [
        slot for slot in slots(Case(geometry("swin_tiny_c24_patch4_window8_256"), 1, kind, 80)) if not slot.shape[0]
    ]
    assert len(empty) == 12 + 4 + 3 + 1  # packed biases and masks of heads of 24; the last stage's missing tensors
    for slot in empty:
        is_merging = kind == "int8" and slot.name.startswith("layers.3.downsample.")
        assert slot.dtype == ("float32" if is_merging else kind.replace("int8", "float16"))


@pytest.mark.parametrize(
    ("name", "version", "sides"),
    [
        (V1.format("tiny"), 1, [64, 64, 64, 64]),
        ("swin_base_patch4_window12_384_finetune", 1, [256, 256, 256, 256]),
        ("swinv2_tiny_patch4_window16_256", 2, [256, 256, 256, 64]),
        ("swinv2_base_patch4_window12_192_22k", 2, [256, 256, 256, 64]),
        ("swinv2_base_patch4_window12to24_192to384_22kto1k_ft", 2, [0, 0, 0, 256]),
        ("swin_tiny_c24_patch4_window8_256", 1, [0, 0, 0, 0]),
    ],
)
def test_packed_biases_and_the_plugin_s_counts(name, version, sides):
    """docs/reference, sections 1.2 and 4.2: counts that the plugin recomputes from the geometry."""
    g = geometry(name)
    counts = plugin(g, version)["weights"]
    for i, side in enumerate(sides):
        c, heads, tokens = g.embed_dim * 2**i, g.heads[i], min(g.window, g.image_size // 4 // 2**i) ** 2
        nw = (g.image_size // 4 // 2**i) ** 2 // tokens
        last = i == 3
        expected = {
            f"attention_qkv_kernel_{i}_0": 3 * c * c,
            f"attention_proj_kernel_{i}_1": c * c,
            f"mlp_linear_kernel_{i}_0": 4 * c * c,
            f"mlp_linear2_kernel_{i}_0": 4 * c * c,
            f"block_d_amaxlist_{i}_0": 96,
            f"attention_relative_pos_bias_{i}_0": heads * tokens**2,
            f"trt_relative_position_bias_{i}_0": heads * side**2,
            f"patchMerge_norm_gamma_{i}": 0 if last else (4 * c if version == 1 else 2 * c),
            f"patchMerge_linear_kernel_{i}": 0 if last else 8 * c * c,
            f"attn_mask_{i}": nw * tokens**2 if nw > 1 else 0,
            f"trt_attn_mask_{i}": nw * side**2 if nw > 1 else 0,
        }
        assert {field: counts[field] for field in expected} == expected
    assert counts["patchEmbed_proj_kernel"] == g.embed_dim * 48 and counts["norm_beta"] == 8 * g.embed_dim


def test_the_plugin_s_fields():
    """docs/reference, section 4.2."""
    g = geometry(V1.format("tiny"))
    made = plugin(g, 1)
    fields = {name: (kind, value) for name, kind, value in made["fields"]}
    assert made["name"] == "CustomSwinTransformerINT8Plugin" and made["output"] == [-1, 768, 1, 1]
    assert fields == {
        "int8_mode": ("int32", 1), "max_batch_size": ("int32", 32), "img_size": ("int32", 224),
        "patch_size": ("int32", 4), "in_chans": ("int32", 3), "embed_dim": ("int32", 96), "window_size": ("int32", 7),
        "ape": ("int32", 0), "patch_norm": ("int32", 1), "layer_num": ("int32", 4), "mlp_ratio": ("float32", 4.0),
        "qkv_bias": ("int32", 1), "qk_scale": ("float32", 1.0), "version": ("int32", 1),
        "depths": ("int32", [2, 2, 6, 2]), "num_heads": ("int32", [3, 6, 12, 24]),
    }  # fmt: skip
    float_ = plugin(g, 1, "float16", None)
    assert float_["name"] == "CustomSwinTransformerPlugin"
    assert {name for name, _, _ in float_["fields"]} == set(fields) - {"int8_mode"}


NODES = [
    "attn.qkv._input", "attn.qkv._aftergemm", "attn.proj._input", "attn.proj._aftergemm", "attn.matmul_q_input",
    "attn.matmul_k_input", "attn.matmul_v_input", "attn.matmul_a_input", "attn.softmax_input", "mlp.fc1._input",
    "mlp.fc1._aftergemm", "mlp.fc2._input", "mlp.fc2._aftergemm",
]  # fmt: skip
OTHERS = {1: ["add1_residual_input", "add2_residual_input"], 2: ["attn.mha_q_input", "attn.mha_k_input"]}
WEIGHTS = ["attn.qkv._weight", "attn.proj._weight", "mlp.fc1._weight", "mlp.fc2._weight"]
MERGING = [f"downsample.reduction._{x}" for x in ("input", "aftergemm", "weight")]


def ranges(version, merging):
    names = [*NODES, *OTHERS[version], *WEIGHTS, *(MERGING if merging else [])]
    return {name: 0.37 * (i + 1) ** 1.3 for i, name in enumerate(names)}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("merging", [True, False])
def test_every_index(version, merging):
    a = ranges(version, merging)
    given = {f"{name}_quantizer": value for name, value in a.items()}
    expected = np.zeros(96)
    quads = [*NODES, *OTHERS[version], *(MERGING[:2] if merging else [])]
    for i, name in enumerate(quads):
        expected[4 * i : 4 * i + 4] = a[name], a[name] / 127, a[name] / 127**2, 127 / a[name]
    expected[72:76] = [a[name] for name in WEIGHTS]
    for i, layer in enumerate(["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]):
        expected[77 + i] = a[f"{layer}._input"] * a[f"{layer}._weight"] / (127 * a[f"{layer}._aftergemm"])
    q, k = ("attn.mha_q_input", "attn.mha_k_input") if version == 2 else ("attn.matmul_q_input", "attn.matmul_k_input")
    expected[81] = a[q] * a[k] / (127 * a["attn.softmax_input"])
    expected[82] = a["attn.matmul_a_input"] * a["attn.matmul_v_input"] / (127 * a["attn.proj._input"])
    if merging:
        expected[76] = a[MERGING[2]]
        expected[83] = a[MERGING[0]] * a[MERGING[2]] / (127 * a[MERGING[1]])
    got, stored = amax_list(given, version).numpy(), expected.astype(np.float32)
    at = {"q": 52, "k": 56} if version == 2 else {"q": 16, "k": 20}
    # From here on computed from stored entries: float32 products, divided in double (section 3.4).
    stored[85] = float(stored[at["q"]] * stored[at["k"]]) / (127.0 * 127.0)
    stored[86] = 127.0 / float(stored[28])
    stored[87] = float(stored[24] * stored[28]) / (127.0 * float(stored[8]))
    np.testing.assert_array_equal(got[85:], stored[85:])
    np.testing.assert_allclose(got[:85], stored[:85], rtol=2e-7, atol=0)


def test_the_fused_factors_round_their_products_to_float32():
    """87 and 82 are the same product of ranges, but not always the same float32."""
    lists = [
        amax_list({f"{n}_quantizer": a * s for n, a in ranges(1, False).items()}, 1) for s in np.linspace(1, 2, 99)
    ]
    differ = [bool(values[82] != values[87]) for values in lists]
    assert any(differ) and not all(differ)
