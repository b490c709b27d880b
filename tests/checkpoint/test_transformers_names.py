"""Hugging Face transformers' names become ours: recorded ones always, its own models if it is installed."""

import pytest
import torch
from safetensors.torch import save_file

from swin_quant.base.errors import SwinQuantError
from swin_quant.checkpoint import load_float
from swin_quant.checkpoint.names import to_microsoft
from swin_quant.models import build_model
from tests.helpers.settings import small_config

# One block of 16 channels, window 4, as transformers 4.16 to 5.23 write it: name within the block -> shape.
BLOCK = {
    "attention.self.query.weight": (16, 16),
    "attention.self.query.bias": (16,),
    "attention.self.key.weight": (16, 16),
    "attention.self.value.weight": (16, 16),
    "attention.self.value.bias": (16,),
    "attention.output.dense.weight": (16, 16),
    "attention.output.dense.bias": (16,),
    "layernorm_before.weight": (16,),
    "layernorm_before.bias": (16,),
    "layernorm_after.weight": (16,),
    "layernorm_after.bias": (16,),
    "intermediate.dense.weight": (64, 16),
    "intermediate.dense.bias": (64,),
    "output.dense.weight": (16, 64),
    "output.dense.bias": (16,),
}
ATTENTION = {
    "swin": {"attention.self.key.bias": (16,), "attention.self.relative_position_bias_table": (49, 1)},
    "swinv2": {
        "attention.self.logit_scale": (1, 1, 1),
        "attention.self.continuous_position_bias_mlp.0.weight": (512, 2),
        "attention.self.continuous_position_bias_mlp.0.bias": (512,),
        "attention.self.continuous_position_bias_mlp.2.weight": (1, 512),
    },
}
AROUND = {
    "embeddings.patch_embeddings.projection.weight": (16, 3, 2, 2),
    "embeddings.patch_embeddings.projection.bias": (16,),
    "embeddings.norm.weight": (16,),
    "embeddings.norm.bias": (16,),
    "layernorm.weight": (16,),
    "layernorm.bias": (16,),
}
IN_MEMORY = {  # the modules of V1 since transformers 5
    "attention.self.query": "attention.q_proj",
    "attention.self.key": "attention.k_proj",
    "attention.self.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "attention.self.relative": "attention.relative_position_bias.relative",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


def config(kind, depths=(1,), **keys):
    return small_config(kind, DEPTHS=list(depths), NUM_HEADS=[2**stage for stage in range(len(depths))], **keys)


def recorded(kind):
    state = {f"{kind}.{key}": torch.randn(shape) for key, shape in AROUND.items()}
    block = {**BLOCK, **ATTENTION[kind]}
    state |= {f"{kind}.encoder.layers.0.blocks.0.{key}": torch.randn(shape) for key, shape in block.items()}
    return state | {"classifier.weight": torch.randn(10, 16), "classifier.bias": torch.randn(10)}


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_recorded_names_load(tmp_path, kind):
    state = recorded(kind)
    save_file(state, tmp_path / "model.safetensors")
    model = build_model(config(kind))
    assert load_float(model, tmp_path / "model.safetensors").format == "safetensors, transformers names"
    attn, theirs = model.layers[0].blocks[0].attn, f"{kind}.encoder.layers.0.blocks.0.attention.self."

    def joined(kind):
        return torch.cat([state[f"{theirs}{part}.{kind}"] for part in ("query", "key", "value")])

    assert torch.equal(attn.qkv.weight, joined("weight"))
    if kind == "swin":
        assert torch.equal(attn.qkv.bias, joined("bias"))
    else:
        assert torch.equal(attn.q_bias, state[f"{theirs}query.bias"])
        assert torch.equal(attn.v_bias, state[f"{theirs}value.bias"])


def test_names_in_memory_and_of_the_body_alone_are_the_same():
    state = recorded("swin")
    expected, _ = to_microsoft(dict(state))
    newer = dict(state)
    for old, new in IN_MEMORY.items():
        newer = {key.replace(f"blocks.0.{old}", f"blocks.0.{new}"): value for key, value in newer.items()}
    body = {key.removeprefix("swin."): value for key, value in state.items()}
    assert not set(newer) <= set(state)
    for other in (newer, body):
        renamed, convention = to_microsoft(other)
        assert convention == "transformers" and renamed.keys() == expected.keys()
        assert all(torch.equal(renamed[key], expected[key]) for key in expected)


@pytest.mark.parametrize("change", ["drop", "shape", "type"])
def test_half_a_qkv_is_an_error(change):
    state, key = recorded("swin"), "swin.encoder.layers.0.blocks.0.attention.self.key.weight"
    tensor = state.pop(key)
    if change != "drop":
        state[key] = tensor[1:] if change == "shape" else tensor.half()
    with pytest.raises(SwinQuantError, match="q, k and v of layers.0.blocks.0.attn.qkv.weight"):
        to_microsoft(state)
