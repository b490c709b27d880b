"""Models built from the shipped configs: node names and numbers, keys, shapes and buffers."""

import pytest
import torch

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import configs_dir
from swin_quant.config import find_config, load_config
from swin_quant.config.family import Family
from swin_quant.models import build_model, registry
from swin_quant.models.classifier import Architecture
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


def test_a_name_is_taken_once_and_a_strange_model_is_of_no_architecture(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(UsageError, match="architecture 'swin': there is one of that name already"):
        registry.register(Architecture(Family("swin", {}), lambda cfg: None))
    with pytest.raises(SwinQuantError, match="Linear: is of no registered architecture"):
        registry.list_blocks(torch.nn.Linear(1, 1))
