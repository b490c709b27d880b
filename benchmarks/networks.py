"""Networks of transformers, torchvision and timm with random seeded weights, micro and at full size: data for sweep.py.

Each is built as its publisher builds it, from a configuration.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from swin_quant.base.compat import import_timm, import_torchvision

STAGES = [f"stage{number}" for number in range(1, 5)]
SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4]}
SWIN |= {"window_size": 2}
VIT = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT |= {"intermediate_size": 64}
WIDTHS = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
DETECTOR = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
DETECTOR |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 5}
SEGMENTER = {"num_queries": 5, "hidden_dim": 32, "encoder_feedforward_dim": 32, "encoder_layers": 1}
SEGMENTER |= {"decoder_layers": 2, "num_attention_heads": 2, "dim_feedforward": 32, "num_labels": 4}


@dataclass(frozen=True)
class Network:
    """A network: its builder, the shape of one input, the output group to compare (None: all), and the inputs beside
    the first, which is called `first`: one example [1, ...] of each by its name. `count`: inputs that calibrate, and as
    many that judge."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 64, 64)
    output: Any = None
    first: str = "pixel_values"
    others: dict[str, Tensor] = field(default_factory=dict)
    count: int = 4

    def given(self, images: Tensor) -> Any:
        """The input of a batch, or all inputs by name."""
        if not self.others:
            return images
        count = len(images)
        return {self.first: images} | {
            key: one.repeat(count, *[1] * (one.dim() - 1)) for key, one in self.others.items()
        }


class Grounded(nn.Module):
    """A GroundingDINO that looks for fixed words, since its masks depend on their values; with the logits of these
    words only: its own has -inf for all others."""

    def __init__(self, model: nn.Module, words: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("words", words, persistent=False)

    def forward(self, pixel_values: Tensor) -> Any:
        words = self.words.expand(pixel_values.shape[0], -1)
        found = self.model(pixel_values, words, torch.zeros_like(words), torch.ones_like(words))
        return {"logits": found.logits[..., : words.shape[1]], "pred_boxes": found.pred_boxes}


def hf(model: str, config: str, **keys: Any) -> Callable[[], nn.Module]:
    """A class of transformers, built from a configuration."""

    def build() -> nn.Module:
        import_timm()  # transformers imports it
        import transformers

        return getattr(transformers, model)(_configured(transformers, config, keys))

    return build


def swin(stages: list[str] = STAGES) -> tuple[str, dict[str, Any]]:
    """The configuration of a Swin backbone."""
    return "SwinConfig", {**SWIN, "out_features": stages}


def _configured(transformers: Any, config: str, keys: dict[str, Any]) -> Any:
    given = {
        key: _configured(transformers, *value) if isinstance(value, tuple) and key.endswith("_config") else value
        for key, value in keys.items()
    }
    return getattr(transformers, config)(**given)


def _video() -> nn.Module:
    import_torchvision()
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    sizes = {"patch_size": [2, 4, 4], "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2], "window_size": [2, 4, 4]}
    return SwinTransformer3d(**sizes, num_classes=5)


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: import_timm().create_model(name, num_classes=5, **options)


DETR = {**DETECTOR, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
BERT = ("BertConfig", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32})
BERT[1]["vocab_size"] = 1100
WORDS = torch.tensor([[101, 7, 8, 1012, 102]])
CLASSES = {"num_labels": 5}

TEXT = {**BERT[1], "max_position_embeddings": 32}
HTSAT = {"window_size": 4, "num_mel_bins": 16, "spec_size": 64, "patch_size": 4, "patch_stride": [4, 4]}
HTSAT |= {"depths": [1, 1], "num_attention_heads": [2, 4], "patch_embeds_hidden_size": 16, "hidden_size": 32}
HTSAT |= {"enable_fusion": False}

# Swin in other networks: the rows of docs/backbones.md.
SWINS = {
    "Swin": Network(hf("SwinForImageClassification", "SwinConfig", **SWIN, **CLASSES)),
    "Swinv2": Network(hf("Swinv2ForImageClassification", "Swinv2Config", **SWIN, **CLASSES)),
    "SwinBackbone": Network(hf("SwinBackbone", *swin()[:1], **swin()[1])),
    "Swinv2Backbone": Network(hf("Swinv2Backbone", "Swinv2Config", **SWIN, out_features=STAGES)),
    "UperNet": Network(hf("UperNetForSemanticSegmentation", "UperNetConfig", backbone_config=swin(), hidden_size=16,
        num_labels=4, auxiliary_channels=16, auxiliary_in_channels=64)),
    "MaskFormer": Network(hf("MaskFormerForInstanceSegmentation", "MaskFormerConfig", backbone_config=swin(),
        fpn_feature_size=32, mask_feature_size=32, decoder_config=("DetrConfig", {**DETR,
        "backbone_config": ("ResNetConfig", {})}), num_labels=4)),
    "Mask2Former": Network(hf("Mask2FormerForUniversalSegmentation", "Mask2FormerConfig", backbone_config=swin(),
        feature_size=32, mask_feature_size=32, **SEGMENTER)),
    "OneFormer": Network(hf("OneFormerForUniversalSegmentation", "OneFormerConfig", backbone_config=swin(), **SEGMENTER,
        mask_dim=32, conv_dim=32, text_encoder_width=16, text_encoder_num_layers=1, text_encoder_n_ctx=4,
        is_training=False, use_auxiliary_loss=False, task_seq_len=7), others={"task_inputs": torch.arange(7.0)[None]}),
    "DETR": Network(hf("DetrForObjectDetection", "DetrConfig", **DETR, backbone_config=swin())),
    "DeformableDETR": Network(hf("DeformableDetrForObjectDetection", "DeformableDetrConfig", **DETR,
        backbone_config=swin(), num_feature_levels=4)),
    "GroundingDINO": Network(lambda: Grounded(hf("GroundingDinoForObjectDetection", "GroundingDinoConfig",
        **{**DETECTOR, "d_model": 64},  # its norms have 32 groups, and a map of one value
        use_timm_backbone=False, backbone=None, backbone_config=swin(STAGES[1:]), text_config=BERT)(), WORDS),
        output=("logits", "pred_boxes")),
    "DonutSwin": Network(hf("DonutSwinModel", "DonutSwinConfig", **{**SWIN, "image_size": [128, 64]}), (3, 128, 64)),
    "Swin2SR": Network(hf("Swin2SRForImageSuperResolution", "Swin2SRConfig", image_size=32, patch_size=1, embed_dim=16,
        depths=[1, 1], num_heads=[2, 2], window_size=4, upscale=2), (3, 32, 32)),
    "CLAP audio": Network(hf("ClapAudioModelWithProjection", "ClapAudioConfig", **HTSAT, projection_dim=16),
        (1, 250, 16)),
    "CLAP": Network(hf("ClapModel", "ClapConfig", audio_config=HTSAT, text_config=TEXT, projection_dim=16),
        (1, 250, 16), ("text_embeds", "audio_embeds"), "input_features", {"input_ids": WORDS,
        "attention_mask": torch.ones_like(WORDS)}),
    "torchvision swin3d": Network(_video, (3, 4, 32, 32)),
    "timm swinv2_cr": Network(_timm("swinv2_cr_tiny_224", img_size=64, window_size=2, embed_dim=16, depths=(1, 1, 1, 1),
        num_heads=(2, 2, 4, 4))),
    "timm swin_s3": Network(_timm("swin_s3_tiny_224", img_size=64, window_size=(4, 4, 2, 2), embed_dim=16,
        depths=(1, 1, 1, 1), num_heads=(2, 2, 4, 4))),
}  # fmt: skip
OTHERS = {
    "ViT": Network(hf("ViTForImageClassification", "ViTConfig", **VIT, **CLASSES), (3, 32, 32)),
    "ViTMAE": Network(hf("ViTModel", "ViTConfig", **VIT), (3, 32, 32)),
    "DeiT": Network(hf("DeiTForImageClassificationWithTeacher", "DeiTConfig", **VIT, **CLASSES), (3, 32, 32)),
    "BEiT": Network(hf("BeitForImageClassification", "BeitConfig", **VIT, **CLASSES, use_relative_position_bias=True),
        (3, 32, 32)),
    "CLIP": Network(hf("CLIPModel", "CLIPConfig", vision_config=VIT, text_config={**TEXT, "eos_token_id": 102},
        projection_dim=16), (3, 32, 32), ("text_embeds", "image_embeds"), others={"input_ids": WORDS,
        "attention_mask": torch.ones_like(WORDS)}),
    "CLIP vision": Network(hf("CLIPVisionModelWithProjection", "CLIPVisionConfig", **VIT, projection_dim=16),
        (3, 32, 32)),
    "SigLIP": Network(hf("SiglipVisionModel", "SiglipVisionConfig", **VIT), (3, 32, 32)),
    "DINOv2": Network(hf("Dinov2ForImageClassification", "Dinov2Config", image_size=32, patch_size=8, hidden_size=32,
        num_hidden_layers=2, num_attention_heads=2, **CLASSES), (3, 32, 32)),
    "DINOv3": Network(hf("DINOv3ViTModel", "DINOv3ViTConfig", **VIT), (3, 32, 32)),
    "ConvNeXt": Network(hf("ConvNextForImageClassification", "ConvNextConfig", **WIDTHS, **CLASSES)),
    "ConvNeXtV2": Network(hf("ConvNextV2ForImageClassification", "ConvNextV2Config", **WIDTHS, **CLASSES)),
    "ResNet": Network(hf("ResNetForImageClassification", "ResNetConfig", embedding_size=8, **WIDTHS, **CLASSES)),
    "BiT": Network(hf("BitForImageClassification", "BitConfig", embedding_size=8, hidden_sizes=[32, 32, 32, 64],
        depths=[1, 1, 1, 1], num_groups=8, **CLASSES)),
    "RegNet": Network(hf("RegNetForImageClassification", "RegNetConfig", embedding_size=8, groups_width=8, **WIDTHS,
        **CLASSES)),
    "EfficientNet": Network(hf("EfficientNetForImageClassification", "EfficientNetConfig", image_size=64,
        width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320, **CLASSES)),
    "MobileNetV2": Network(hf("MobileNetV2ForImageClassification", "MobileNetV2Config", image_size=64,
        depth_multiplier=0.35, **CLASSES)),
    "MobileViT": Network(hf("MobileViTForImageClassification", "MobileViTConfig", image_size=64,
        hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 64], num_attention_heads=2, **CLASSES)),
    "PVTv2": Network(hf("PvtV2ForImageClassification", "PvtV2Config", image_size=64, num_attention_heads=[1, 2, 2, 2],
        **WIDTHS, **CLASSES)),
    "LeViT": Network(hf("LevitForImageClassification", "LevitConfig", image_size=64, hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8], **CLASSES)),
    "Hiera": Network(hf("HieraForImageClassification", "HieraConfig", image_size=[64, 64], embed_dim=16,
        depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 2], **CLASSES)),
    "FocalNet": Network(hf("FocalNetForImageClassification", "FocalNetConfig", image_size=64, embed_dim=8,
        depths=[1, 1], focal_levels=[1, 1], focal_windows=[3, 3], hidden_sizes=[8, 16], **CLASSES)),
    "SegFormer": Network(hf("SegformerForSemanticSegmentation", "SegformerConfig", num_attention_heads=[1, 2, 2, 2],
        decoder_hidden_size=16, num_labels=4, **WIDTHS)),
    "DPT": Network(hf("DPTForDepthEstimation", "DPTConfig", **{**VIT, "image_size": 64, "patch_size": 16,
        "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16, is_hybrid=False)),
    "DepthAnything": Network(hf("DepthAnythingForDepthEstimation", "DepthAnythingConfig",
        backbone_config=("Dinov2Config", {"image_size": 56, "patch_size": 14, "hidden_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 2, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}),
        reassemble_hidden_size=32, patch_size=14, neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16,
        head_hidden_size=8), (3, 56, 56)),
    "YOLOS": Network(hf("YolosForObjectDetection", "YolosConfig", **{**VIT, "image_size": [64, 64], "patch_size": 16},
        num_detection_tokens=5)),
    "RT-DETR": Network(hf("RTDetrForObjectDetection", "RTDetrConfig", backbone_config=("RTDetrResNetConfig",
        {"embedding_size": 8, **WIDTHS, "out_features": STAGES[1:]}), encoder_in_channels=[16, 16, 32],
        encoder_hidden_dim=32, **DETECTOR, decoder_in_channels=[32, 32, 32], use_timm_backbone=False, num_labels=4,
        anchor_image_size=None)),
}  # fmt: skip
# Swin-T as its authors sized it.
TINY = ("SwinConfig", {"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "out_features": STAGES})
FULL = {
    "UperNet with Swin-T": Network(hf("UperNetForSemanticSegmentation", "UperNetConfig", backbone_config=TINY,
        auxiliary_in_channels=384), (3, 512, 512), count=1),
    "Mask2Former with Swin-T": Network(hf("Mask2FormerForUniversalSegmentation", "Mask2FormerConfig",
        backbone_config=TINY), (3, 384, 384), count=1),
    "DETR with Swin-T": Network(hf("DetrForObjectDetection", "DetrConfig", backbone_config=TINY,
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None), (3, 512, 512), count=1),
    "DonutSwin base": Network(hf("DonutSwinModel", "DonutSwinConfig", image_size=[2560, 1920], embed_dim=128,
        depths=[2, 2, 14, 2], num_heads=[4, 8, 16, 32], window_size=10), (3, 2560, 1920), count=1),
    "Swin2SR classical x2": Network(hf("Swin2SRForImageSuperResolution", "Swin2SRConfig"), (3, 64, 64), count=1),
    "CLAP audio (HTSAT)": Network(hf("ClapAudioModelWithProjection", "ClapAudioConfig"), (1, 1001, 64), count=1),
    "torchvision swin3d_t": Network(lambda: import_torchvision().models.get_model("swin3d_t", weights=None),
        (3, 16, 112, 112), count=1),
    "timm swinv2_cr_tiny_224": Network(_timm("swinv2_cr_tiny_224"), (3, 224, 224)),
    "timm swin_s3_tiny_224": Network(_timm("swin_s3_tiny_224"), (3, 224, 224)),
}  # fmt: skip
NETWORKS = SWINS | OTHERS


def built(name: str) -> nn.Module:
    """The network, with weights that keep activations at their size: none is zero or one."""
    torch.manual_seed(0)
    network = (NETWORKS | FULL)[name].build().eval()
    with torch.no_grad():
        for value in network.parameters():
            if value.dim() > 1 and value.numel():
                value.normal_(0, (value.numel() / value.shape[0]) ** -0.5)
            else:
                value.add_(0.1 * torch.randn_like(value))
        for key, value in network.named_buffers():
            if key.endswith("running_var"):
                value.uniform_(0.5, 2)
    return network


def is_there(name: str) -> bool:
    """Whether the network's library is installed."""
    return name.startswith(("timm", "torchvision")) or importlib.util.find_spec("transformers") is not None
