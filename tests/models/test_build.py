"""Models built from the shipped configs: node names and numbers, keys, shapes and buffers."""

import pytest
import torch

from swin_quant.base.files import configs_dir
from swin_quant.config import find_config, load_config
from swin_quant.models import build_model
from swin_quant.quant.quantizer import State, named_nodes

CONFIGS = sorted(path for folder in ("swin", "swinv2") for path in (configs_dir() / folder).glob("[!_]*.yaml"))

# docs/reference, section 1.3: name: the versions that have it.
LINEAR = ("_input_quantizer", "_weight_quantizer", "_aftergemm_quantizer")
BLOCK = {
    **{f"{linear}.{node}": "12" for linear in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2") for node in LINEAR},
    **{f"attn.matmul_{operand}_input_quantizer": "12" for operand in "qkva"},
    "attn.softmax_input_quantizer": "12",
    **{f"attn.mha_{operand}_input_quantizer": "2" for operand in "qk"},
    **{f"layernorm_input{number}_quantizer": "12" for number in (1, 2)},
    **{f"add{number}_{side}_input_quantizer": "12" for number in (1, 2) for side in ("local", "residual")},
}

# docs/reference, section 1.2: config: stage resolutions, window in use, nW, stages whose odd blocks have a mask.
GEOMETRY = {
    "swin_tiny_patch4_window7_224": ([56, 28, 14, 7], [7, 7, 7, 7], [64, 16, 4, 1], [0, 1, 2]),
    "swin_base_patch4_window12_384_finetune": ([96, 48, 24, 12], [12, 12, 12, 12], [64, 16, 4, 1], [0, 1, 2]),
    "swin_tiny_c24_patch4_window8_256": ([64, 32, 16, 8], [8, 8, 8, 8], [64, 16, 4, 1], [0, 1, 2]),
    "swinv2_tiny_patch4_window8_256": ([64, 32, 16, 8], [8, 8, 8, 8], [64, 16, 4, 1], [0, 1, 2]),
    "swinv2_tiny_patch4_window16_256": ([64, 32, 16, 8], [16, 16, 16, 8], [16, 4, 1, 1], [0, 1]),
    "swinv2_base_patch4_window12to24_192to384_22kto1k_ft": ([96, 48, 24, 12], [24, 24, 24, 12], [16, 4, 1, 1], [0, 1]),
    "swinv2_base_patch4_window12_192_22k": ([48, 24, 12, 6], [12, 12, 12, 6], [16, 4, 1, 1], [0, 1]),
}


def built(name):
    """The model of a shipped config without memory for its weights."""
    with torch.device("meta"):
        return build_model(load_config(find_config(name)))


def expected_nodes(version, depths):
    names = [name for name, versions in BLOCK.items() if version in versions]
    blocks = {f"layers.{i}.blocks.{j}.{name}" for i, depth in enumerate(depths) for j in range(depth) for name in names}
    return blocks | {f"layers.{i}.downsample.reduction.{node}" for i in range(len(depths) - 1) for node in LINEAR}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_has_the_nodes_of_the_spec(path):
    cfg = load_config(path)
    version = "2" if path.stem.startswith("swinv2") else "1"
    deep = cfg.MODEL[cfg.MODEL.TYPE.upper()].DEPTHS[2] == 18
    nodes = named_nodes(built(path))
    assert nodes.keys() == expected_nodes(version, [2, 2, 18 if deep else 6, 2])
    assert len(nodes) == {("1", False): 285, ("1", True): 561, ("2", False): 309, ("2", True): 609}[version, deep]


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_nodes_know_their_names_and_are_off(kind, tiny_model):
    model = tiny_model(kind)
    for name, node in named_nodes(model).items():
        assert node.name == name and model.get_submodule(name) is node
        assert node.state is State.OFF and not node.setting.enabled and node.amax is None
    assert not model.training


@pytest.mark.parametrize("name", GEOMETRY)
def test_buffers_are_where_the_spec_has_them(name):
    resolutions, windows, counts, shifted = GEOMETRY[name]
    model = built(name)
    state = model.state_dict()
    for i, layer in enumerate(model.layers):
        length = windows[i] ** 2
        for j, block in enumerate(layer.blocks):
            prefix = f"layers.{i}.blocks.{j}"
            assert block.resolution == resolutions[i] and block.window == windows[i]
            assert state[f"{prefix}.attn.relative_position_index"].shape == (length, length)
            assert state[f"{prefix}.attn.relative_position_index"].dtype == torch.int64
            masked = j % 2 == 1 and i in shifted
            assert (f"{prefix}.attn_mask" in state) == masked
            if masked:
                assert state[f"{prefix}.attn_mask"].shape == (counts[i], length, length)
                assert state[f"{prefix}.attn_mask"].dtype == torch.float32
            side = 2 * windows[i] - 1
            if name.startswith("swinv2"):
                assert state[f"{prefix}.attn.relative_coords_table"].shape == (1, side, side, 2)
            else:
                assert state[f"{prefix}.attn.relative_position_bias_table"].shape == (side**2, model.geometry.heads[i])


def expected_keys(version, width, depths, heads, window, classes):
    """Key: shape, of the float checkpoint; docs/reference, section 1.2. One window for all stages, none clipped."""
    last = width * 2 ** (len(depths) - 1)
    keys = {
        "patch_embed.proj.weight": (width, 3, 2, 2),
        "patch_embed.proj.bias": (width,),
        "patch_embed.norm.weight": (width,),
        "patch_embed.norm.bias": (width,),
        "norm.weight": (last,),
        "norm.bias": (last,),
        "head.weight": (classes, last),
        "head.bias": (classes,),
    }
    for i, depth in enumerate(depths):
        c, h, side = width * 2**i, heads[i], 2 * window - 1
        for j in range(depth):
            block = {
                **{f"{norm}.{key}": (c,) for norm in ("norm1", "norm2") for key in ("weight", "bias")},
                "attn.qkv.weight": (3 * c, c),
                "attn.proj.weight": (c, c),
                "attn.proj.bias": (c,),
                "attn.relative_position_index": (window**2, window**2),
                "mlp.fc1.weight": (4 * c, c),
                "mlp.fc1.bias": (4 * c,),
                "mlp.fc2.weight": (c, 4 * c),
                "mlp.fc2.bias": (c,),
            }
            if version == 1:
                block |= {"attn.qkv.bias": (3 * c,), "attn.relative_position_bias_table": (side**2, h)}
            else:
                block |= {
                    "attn.q_bias": (c,),
                    "attn.v_bias": (c,),
                    "attn.logit_scale": (h, 1, 1),
                    "attn.cpb_mlp.0.weight": (512, 2),
                    "attn.cpb_mlp.0.bias": (512,),
                    "attn.cpb_mlp.2.weight": (h, 512),
                    "attn.relative_coords_table": (1, side, side, 2),
                }
            keys |= {f"layers.{i}.blocks.{j}.{key}": shape for key, shape in block.items()}
        if i < len(depths) - 1:
            normed = 4 * c if version == 1 else 2 * c
            keys |= {
                f"layers.{i}.downsample.reduction.weight": (2 * c, 4 * c),
                f"layers.{i}.downsample.norm.weight": (normed,),
                f"layers.{i}.downsample.norm.bias": (normed,),
            }
    return keys


@pytest.mark.parametrize(("kind", "version"), [("swin", 1), ("swinv2", 2)])
def test_float_keys_and_shapes_are_those_of_the_spec(kind, version, tiny_model):
    model = tiny_model(kind, DEPTHS=[1, 1], NUM_HEADS=[1, 2])
    keys = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert keys == expected_keys(version, 32, [1, 1], [1, 2], 4, 10)


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_calibrated_keys_are_added_to_the_float_ones(kind, tiny_model):
    model = tiny_model(kind)
    before = set(model.state_dict())
    nodes = named_nodes(model)
    for node in nodes.values():
        node.amax = 1.0
    after = model.state_dict()
    assert set(after) - before == {f"{name}._amax" for name in nodes}
    assert all(after[f"{name}._amax"].shape == () for name in nodes)


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
@pytest.mark.parametrize(
    "keys",
    [
        {"APE": True},
        {"QKV_BIAS": False},
        {"PATCH_NORM": False},
        {"WINDOW_SIZE": 16},
        {"EMBED_DIM": 24, "NUM_HEADS": [2, 4, 8, 16]},
        {"MLP_RATIO": 2.0},
        {"IMG_SIZE": 64, "PATCH_SIZE": 4, "IN_CHANS": 1},
        {"WINDOW_SIZE": 2},
    ],
    ids=lambda keys: "-".join(f"{key}={value}" for key, value in keys.items()).replace(" ", ""),
)
def test_options_run_and_matter(kind, keys, tiny_model):
    """Each option builds and runs; where weights stay comparable, logits are finite and depend on the picture."""
    model = tiny_model(kind, **keys)
    g = model.geometry
    with torch.no_grad():
        one, two = model(torch.randn(2, g.in_chans, g.image_size, g.image_size))
    assert one.shape == (10,) and one.isfinite().all() and not torch.allclose(one, two, atol=1e-3)


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_absolute_positions_are_added_to_the_tokens(kind, tiny_model):
    """A bias of the patch embedding equals the same position embedding everywhere."""
    model, plain = tiny_model(kind, APE=True, PATCH_NORM=False), tiny_model(kind, PATCH_NORM=False)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k != "absolute_pos_embed"})
    offset = torch.randn(32)
    model.absolute_pos_embed.data[:] = offset
    plain.patch_embed.proj.bias.data += offset
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(model(x), plain(x), atol=1e-5)


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_drop_path_works_in_training_only(kind, tiny_model):
    model = tiny_model(kind, DROP_PATH_RATE=0.9)
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(x), model(x))
        model.train()
        assert not torch.allclose(model(x), model(x), atol=1e-3)
