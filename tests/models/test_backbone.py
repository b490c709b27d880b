"""Backbones against timm's `features_only` and the classifier's own stages; windows against brute force."""

import pytest
import torch

from swin_quant.base.compat import import_timm
from swin_quant.base.errors import UsageError
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import apply_policy, load_policy, quantize
from swin_quant.quant.quantizer import named_nodes

TIMM = {"swin": "swin_tiny_patch4_window7_224", "swinv2": "swinv2_tiny_window8_256"}
SHAPE = {"IMG_SIZE": 32, "WINDOW_SIZE": 4, "DEPTHS": [2, 2], "NUM_HEADS": [1, 2]}
SIZES = [(32, 32), (48, 80), (34, 46), (10, 70), (4, 4)]


@pytest.fixture(scope="session")
def tiny_backbone(tiny_model):
    """make("swin" | "swinv2", KEY=value ...) -> a random backbone of two stages for 32 x 32, window 4, patch 2."""
    return lambda kind="swin", **keys: tiny_model(kind, OUTPUT_KIND="features", **SHAPE, **keys)


@pytest.fixture(scope="session", params=["swin", "swinv2"])
def beside_timm(request, tiny_backbone):
    """One of ours, and timm's with the same weights, which takes any multiple of the patch."""
    ours = tiny_backbone(request.param)
    g = ours.geometry
    theirs = import_timm().create_model(
        TIMM[request.param],
        features_only=True,
        out_indices=(0, 1),
        strict_img_size=False,
        img_size=32,
        patch_size=g.patch_size,
        window_size=4,
        embed_dim=g.embed_dim,
        depths=(2, 2),
        num_heads=(1, 2),
        mlp_ratio=g.mlp_ratio,
    )
    state = {}
    for key, value in ours.state_dict().items():
        key = key.replace("layers.0.downsample", "layers.1.downsample").replace("layers.", "layers_", 1)
        state[key] = value
    wanted = theirs.state_dict()
    theirs.load_state_dict({key: value for key, value in state.items() if key in wanted}, strict=True)
    return ours, theirs.eval()


@pytest.mark.parametrize("size", SIZES)
def test_maps_are_those_of_timm(beside_timm, size):
    ours, theirs = beside_timm
    images = torch.randn(2, 3, *size)
    with torch.inference_mode():
        found, expected = ours(images), [x.permute(0, 3, 1, 2) for x in theirs(images)]
    assert [x.shape for x in found] == [x.shape for x in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_some_stages_need_no_later_ones(tiny_backbone):
    first, both = tiny_backbone(STAGES=[0]), tiny_backbone()
    first.load_state_dict({k: v for k, v in both.state_dict().items() if k in first.state_dict()})
    images = torch.randn(1, 3, 20, 36)
    (found,) = first(images)
    assert torch.equal(found, both(images)[0])
    assert not any(name.startswith(("layers.1", "layers.0.downsample", "head", "norm")) for name in first.state_dict())


@pytest.mark.parametrize(("norms", "names"), [("each", {"norm0", "norm1"}), ("last", {"norm"})])
def test_norms_of_outputs(tiny_backbone, norms, names):
    plain, normed = tiny_backbone(), tiny_backbone(NORM=norms)
    assert {name.split(".")[0] for name, _ in normed.named_parameters()} & {"norm", "norm0", "norm1"} == names
    images = torch.randn(1, 3, 20, 36)
    plain.load_state_dict({k: v for k, v in normed.state_dict().items() if k in plain.state_dict()})
    for stage, (x, y) in enumerate(zip(plain(images), normed(images), strict=True)):
        norm = getattr(normed, f"norm{stage}", None) if norms == "each" else normed.norm if stage == 1 else None
        x = x.permute(0, 2, 3, 1)
        expected = x if norm is None else torch.nn.functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)
        torch.testing.assert_close(y.permute(0, 2, 3, 1), expected)


def test_an_embedding_is_what_the_head_reads(tiny_model):
    classifier, embedding = tiny_model(), tiny_model(OUTPUT_KIND="embedding")
    embedding.load_state_dict({k: v for k, v in classifier.state_dict().items() if not k.startswith("head")})
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(classifier.head(embedding(images)), classifier(images))


def test_calibration_takes_pictures_of_any_sizes(tiny_backbone):
    sizes = [(2, 32, 32), (1, 20, 44), (2, 32, 32), (1, 9, 8)]
    batches = [torch.randn(count, 3, *size) for count, *size in sizes] + [torch.zeros(0, 3, 32, 32)]
    one, other = tiny_backbone(), tiny_backbone()
    found = calibrate(one, batches, Method("max"))
    calibrate(other, [picture[None] for batch in batches for picture in batch], Method("max"))
    assert found.pictures == 6 and not found.dead
    for (name, node), again in zip(named_nodes(one).items(), named_nodes(other).values(), strict=True):
        assert torch.equal(node.range, again.range), name
    apply_policy(one, load_policy("qdq"))
    exact = one(batches[1])
    quantize(one)
    for x, y in zip(one(batches[1]), exact, strict=True):
        assert 0 < (x - y).square().mean() < 0.05 * y.square().mean()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"STAGES": [0, 2]}, r"MODEL.FEATURES.STAGES is \[0, 2\], but the model has stages 0 to 1"),
        ({"STAGES": [1, 0]}, "each stage once, in ascending order"),
        ({"STAGES": [0], "NORM": "last"}, r"MODEL.FEATURES.NORM last is behind stage 1"),
        ({"APE": True}, "absolute positions .APE. fit one size of pictures"),
        ({"WINDOWS": "whole"}, "MODEL.FEATURES.WINDOWS is .whole., but must be one of timm, detection, mmpretrain"),
    ],
)
def test_outputs_that_there_are_not_are_refused(tiny_backbone, keys, message):
    with pytest.raises(UsageError, match=message):
        tiny_backbone(**keys)
