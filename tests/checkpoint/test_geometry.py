"""State dicts of other models are named, and no Swin is taken for one; models are timm's and torchvision's."""

import functools

import pytest
import torch

from swin_quant.base.compat import import_timm, import_torchvision
from swin_quant.checkpoint.geometry import describe
from swin_quant.checkpoint.names import to_microsoft


@functools.cache
def shapes(library, name, **sizes):
    """The state_dict of a model of timm or torchvision, without values."""
    with torch.device("meta"):
        if library == "timm":
            return import_timm().create_model(name, **sizes).state_dict()
        import_torchvision()
        from torchvision import models

        backbone = {"weights_backbone": None} if "rcnn" in name or "fcn" in name else {}
        return models.get_model(name, weights=None, **backbone).state_dict()


def swin():
    return shapes("timm", "swin_tiny_patch4_window7_224", depths=(1, 1))


@pytest.mark.parametrize(
    ("library", "name", "what"),
    [
        ("timm", "vit_tiny_patch16_224", "a ViT"),
        ("timm", "beit_base_patch16_224", "a ViT"),
        ("timm", "resnet18", "a ResNet"),
        ("timm", "convnext_atto", "a ConvNeXt"),
        ("timm", "efficientnet_b0", "an EfficientNet or MobileNet"),
        ("torchvision", "vit_b_16", "a ViT of torchvision"),
        ("torchvision", "resnet18", "a ResNet"),
        ("torchvision", "convnext_tiny", "a ConvNeXt"),
        (
            "torchvision",
            "fasterrcnn_resnet50_fpn",
            "a detector whose backbone is a ResNet: only classifiers are supported",
        ),
    ],
)
def test_models_of_others_are_named(library, name, what):
    assert describe(shapes(library, name)).removesuffix(", no Swin") == what


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (["layers.0.blocks.0.spatial_mlp.weight", "layers.0.blocks.0.norm1.weight"], "a Swin-MLP: not supported"),
        (["layers.0.blocks.1.mlp._moe_layer.gates.0.wg.weight", "layers.0.blocks.0.norm1.weight"], "a Swin-MoE"),
        (["conv_first.weight", "layers.0.residual_group.blocks.0.attn.qkv.weight"], "a SwinIR"),
        (["layers.0.blocks.0.attn.qkv.weight", "layers_up.1.blocks.0.attn.qkv.weight"], "a Swin-Unet"),
        (
            ["backbone.stages.0.blocks.0.attn.w_msa.qkv.weight", "head.fc.weight"],
            "a Swin of OpenMMLab: not supported as a classifier, but",
        ),
        (["b.layer1.0.conv1.x", "b.layer1.0.bn1.x", "decode_head.x"], "a segmenter whose backbone is a ResNet"),
        (["backbone.anything.weight", "bbox_head.fc.weight"], "a detector whose backbone is not known to us"),
        (["swin.encoder.layer.0.attention.attention.query.weight"], "a ViT of transformers"),
        (["bert.embeddings.word_embeddings.weight"], "a language model"),
        (["model.0.conv.weight", "model.1.conv.weight"], "a YOLO"),
        (["base.lora_A.weight"], "LoRA adapters without their model"),
        (["x", "more", "a", "b"], "no checkpoint of a Swin Transformer (its keys are x, more, a and 1 more)"),
    ],
)
def test_keys_of_others_are_named(keys, what):
    state = {key: torch.zeros(1) for key in keys}
    assert what in describe(state)
    renamed, _ = to_microsoft(state)
    assert what in describe(renamed) or "more" in keys


def test_the_backbone_of_a_detector_is_described():
    state = {f"backbone.{key}": value for key, value in to_microsoft(dict(swin()))[0].items()}
    state |= {"neck.lateral_convs.0.conv.weight": torch.zeros(1), "rpn_head.rpn_conv.weight": torch.zeros(1)}
    assert describe(state) == (
        "a detector whose backbone is a Swin V1 (EMBED_DIM 96, DEPTHS [1, 1], WINDOW_SIZE 7): "
        "only classifiers are supported; its backbone is, by ‹output_kind› features"
    )
