"""Every branch of published ViTs is compiled, and the files are as near to fake-quant as plain ones."""

import pytest
import torch
from decibels import sqnr
from nightly import share
from operator_nodes import exact_policy
from torch import nn

import swin_quant as sq
from swin_quant.base.compat import import_timm, import_torchvision

ATTENTION, MLP = "token_branch=swin_quant::TokenBranch", "mlp=swin_quant::Mlp"
TIMM = [  # name, options, the blocks, and how many of their MLPs are compiled
    ("deit_tiny_patch16_224", {"depth": 2}, 2, 2),
    ("deit_tiny_patch16_224", {}, 12, 12),
    ("beit_base_patch16_224", {"depth": 2}, 2, 2),
    ("vit_small_patch16_dinov3", {"depth": 2}, 2, 2),
    ("eva02_tiny_patch14_224", {"depth": 2}, 2, 2),
    ("vit_small_plus_patch16_dinov3", {"depth": 2}, 2, 2),
    ("vit_giant_patch14_dinov2", {"depth": 1, "img_size": 224}, 1, 1),
    ("deit_small_patch16_224", {"depth": 2, "qk_norm": True}, 2, 2),
    ("eva02_base_patch14_224", {"depth": 2}, 2, 0),  # a norm stands behind the gate
]


def exported(given, side, folder, *forms):
    """The network under fake-quant, pictures, and its file for OpenVINO in each form, by the options of the export."""
    for key, values in given.named_parameters():
        if "bias_table" in key:
            nn.init.normal_(values)
    images = torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(1))
    model = sq.calibrate(sq.wrap(given.eval(), side), [images], exact_policy("cpu-operators"), passes=[])
    files = [sq.export(model, "openvino", folder / str(number), **form) for number, form in enumerate(forms)]
    return model, images, files


@pytest.mark.parametrize("name, options, blocks, mlps", share(TIMM, len(TIMM)))
def test_every_branch_of_a_published_vit_is_compiled(name, options, blocks, mlps, with_operators, tmp_path):
    """By timm, at its published width and number of tokens: as near to fake-quant as the plain file."""
    torch.manual_seed(0)
    given = import_timm().create_model(name, **options)
    side = options.get("img_size", given.pretrained_cfg["input_size"][-1])
    asked = {"plugin": (ATTENTION, MLP) if mlps else (ATTENTION,)}
    model, images, files = exported(given, side, tmp_path, asked, {"plain": True})
    found = {"token_branch": f"{blocks} of {blocks}"} | ({"mlp": f"{mlps} of {blocks}"} if mlps else {})
    assert files[0].card.artifact["options"]["compiled"] == found
    with torch.no_grad():
        wanted = model(images)
        own, plain = (float((torch.as_tensor(file.load()(images)) - wanted).square().sum()) for file in files)
    assert own < max(2 * plain, 2e-3 * float(wanted.square().sum()))


SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 16}
GIVEN = {"intermediate_size": 256}
TRANSFORMERS = {  # model -> more of its configuration
    "ViT": GIVEN,
    "DeiT": GIVEN,
    "Dinov2": {},
    "DINOv3ViT": GIVEN | {"use_gated_mlp": True},
    "Dinov2WithRegisters": {},
    "CLIPVision": GIVEN,
    "Beit": GIVEN | {"use_relative_position_bias": True},
    "SiglipVision": GIVEN,
}


class FirstToken(nn.Module):
    """The class token of a model of transformers."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images).last_hidden_state[:, 0]


@pytest.mark.parametrize("name", share([*TRANSFORMERS, "torchvision"], 8))
def test_the_branches_of_other_publishers_vits_are_compiled(name, measured, tmp_path):
    """Three linears or one, masks that keep everything, layer scale, registers, torch's own attention, rotations, gates
    and position biases."""
    torchvision = import_torchvision()
    torch.manual_seed(0)
    if name == "torchvision":
        given = torchvision.models.vision_transformer.VisionTransformer(64, 16, 2, 2, 128, 256)
        nn.init.normal_(given.heads.head.weight)
    else:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{name}Config")(**SMALL, **TRANSFORMERS[name])
        given = FirstToken(getattr(transformers, f"{name}Model")(config))
    asked = {"plugin": (ATTENTION, MLP)} if name in ("DINOv3ViT", "Beit") else {}  # files do not have them by default
    model, images, (file,) = exported(given, 64, tmp_path, asked)
    assert file.card.artifact["options"]["compiled"] == dict.fromkeys(("token_branch", "mlp"), "2 of 2")
    with torch.no_grad():
        assert sqnr(model(images), file.load()(images)) > 30
        assert sqnr(given(images), file.load()(images)) > 25
