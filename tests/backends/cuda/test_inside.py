"""Inside the engine: the results of launches equal those of the model's modules and nodes, under the same names."""

import pytest
import torch

from swin_quant.backends.cuda.inside import inside
from swin_quant.base.distributed import World
from swin_quant.quant.policy import load_policy
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.align_sides import artifact_side, compare, model_side
from tests.backends.conftest import pictures


@pytest.fixture
def sides(exported):
    """sides(kind, policy, **options) -> fake-quant, and the engine."""

    def make(kind, policy, **options):
        artifact, model = exported(kind, policy, **options)
        artifact.card.preprocess.update(size=8, crop=False, interpolation="bicubic", mean=[0.5] * 3, std=[0.5] * 3)
        return model_side(model, [load_policy(policy)], World(), "model"), artifact_side(artifact)

    return make


@pytest.mark.parametrize("policy", ["cuda", "qdq", "cuda-fp8"])
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_every_layer_is_that_of_fake_quant(sides, kind, policy):
    below = 20 if policy.endswith("fp8") else 30  # a value on a tie may take either level: their distance
    found = compare(*sides(kind, policy), [pictures(3, seed=2)], below)
    rows = {row.name: row for row in found.rows}
    block = "layers.0.blocks.1"
    q = f"{block}.attn.{'matmul' if kind == 'swin' else 'mha'}_q_input_quantizer"
    inputs = {f"{block}.{layer}._input_quantizer" for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert inputs | {q, block, "patch_embed", "layers.0.downsample", "layers.1.blocks.0", "logits"} <= rows.keys()
    assert found.first is None
    assert rows["layers.0.blocks.0.attn.qkv._input_quantizer"].sqnr_db > 36 and rows["patch_embed"].sqnr_db > 55


def test_a_layer_that_differs_is_found(exported, sides):
    model, engine = sides("swin", "cuda")
    with torch.no_grad():
        model.model.get_submodule("layers.0.blocks.1.mlp.fc1").weight.mul_(1.2)
    found = compare(model, engine, [pictures(3)])
    assert found.first.name == "layers.0.blocks.1.mlp.fc2._input_quantizer"


def test_narrow_heads_lose_their_zeros(exported):
    found = inside(exported("swinv2", keys={"NUM_HEADS": [2, 4]})[0], EngineOptions())(pictures(2))
    at = "layers.0.blocks.0.attn."
    assert found[f"{at}mha_k_input_quantizer"].shape == (8, 2, 16, 4)
    assert found[f"{at}proj._input_quantizer"].shape == (8, 4, 32)


@pytest.mark.parametrize(("kind", "policy"), [("swin", "ft-mode1"), ("swin", "ft-mode2"), ("swinv2", "ft-mode1")])
def test_of_fastertransformer_the_residual_stream(exported, emulator_of, kind, policy):
    """After each part equal to the emulator's to the bit, with shapes as in the model."""
    artifact, model = exported(kind, policy)
    images, expected, shapes = pictures(2), {}, {}
    emulator_of(model, policy, fused=True, misread=False).features(images, expected.__setitem__)
    found = inside(artifact, EngineOptions())(images)
    parts = ["patch_embed", "layers.0.blocks.0", "layers.0.blocks.1", "layers.0.downsample", "layers.1.blocks.0"]
    assert list(found) == parts
    for name in parts:
        model.get_submodule(name).register_forward_hook(lambda m, i, y, name=name: shapes.update({name: y.shape}))
    with torch.inference_mode():
        model(images)
    for name in parts:
        assert found[name].shape == shapes[name]
        assert torch.equal(found[name].half(), expected[name].flatten(1, 2)), name
