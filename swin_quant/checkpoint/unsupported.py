"""Recognise by their keys the state dicts that people mistake for a Swin classifier's, and advise what to do
instead."""

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from swin_quant.base.errors import listed
from swin_quant.checkpoint.geometry import geometry
from swin_quant.checkpoint.names import below

_OPENMMLAB = "a Swin of OpenMMLab"
# Name of a model -> patterns that must all be found in its keys. The first that fits is taken.
_RELATIVES = {
    "a Swin-MLP": (r"^layers\.\d+\.blocks\.\d+\.spatial_mlp\.",),
    "a Swin-MoE": (r"^layers\.\d+\.blocks\.\d+\.mlp\._?moe_layer\.",),
    "a SwinIR (image restoration)": (r"\blayers\.\d+\.residual_group\.(blocks|layers)\.", r"^conv_first\."),
    "a Swin2SR of transformers (image restoration)": (
        r"^(swin2sr\.)?first_convolution\.",
        r"\bencoder\.stages\.\d+\.layers\.",
    ),
    "a Swin-Unet (segmentation)": (r"\blayers_up\.\d+\.",),
    "a Swin V2-CR of timm": (r"^stages\.\d+\.blocks\.\d+\.attn\.meta_mlp\.",),
    "a Swin of torchvision": (r"^features\.\d+\.\d+\.attn\.(relative_position_bias_table|cpb_mlp\.)",),
    _OPENMMLAB: (r"\bstages\.\d+\.blocks\.\d+\.attn\.w_msa\.",),
    "a Swin of TensorFlow or Keras": (r"\bswin_transformer_block\w*/",),
    "a Donut or another encoder and decoder": (r"^encoder\.encoder\.layers\.\d+\.blocks\.", r"^decoder\."),
    "a Swin of masked image modelling, which has no classifier": (r"\bmask_token$", r"^decoder\.\d*\.?weight$"),
}
_WHOLES = {
    "a detector": r"^(neck|rpn|rpn_head|roi_head|roi_heads|bbox_head|mask_head|query_head|proposal_generator|"
    r"box_predictor|class_embed|bbox_embed|(\w+\.)?transformer\.decoder)\.",
    "a segmenter": r"^(decode_head|auxiliary_head|sem_seg_head|panoptic_head|(model\.)?pixel_level_module)\.",
}
_OTHERS = {
    "a ViT": (r"\bblocks\.\d+\.attn\.qkv\.", r"\b(cls_token|pos_embed)$"),
    "a ViT of transformers": (r"^(\w+\.)?encoder\.layer\.\d+\.attention\.attention\.",),
    "a ViT of torchvision": (r"^encoder\.layers\.encoder_layer_\d+\.",),
    "a CLIP": (r"\b(visual|vision_model)\b", r"\b(text_model|token_embedding|logit_scale)\b"),
    "a ConvNeXt": (r"\b(stages\.\d+\.(blocks\.)?\d+\.(conv_dw|dwconv)|features\.\d+\.\d+\.layer_scale)\b",),
    "a ConvNeXt of transformers": (r"^convnext(v2)?\.",),
    "a ResNet": (r"\blayer1\.0\.conv1\.", r"\blayer1\.0\.bn1\."),
    "a ResNet of transformers": (r"^resnet\.",),
    "an EfficientNet or MobileNet": (r"\bblocks\.\d+\.\d+\.(conv_dw|conv_pw)\.",),
    "a MobileNet or another convolutional network of torchvision": (r"^features\.\d+\.", r"^classifier\.\d+\."),
    "a YOLO": (r"^(model\.)?\d+\.(conv|cv1|m\.0)\.",),
    "a diffusion model": (r"\b(down_blocks|input_blocks)\.\d+\.",),
    "a language model": (r"\b(word_embeddings|embed_tokens|wte)\.weight$",),
    "an adapter (LoRA), not the model": (r"\.lora_[AB]\.",),
}
_BACKBONE = re.compile(
    r"^((?:\w+\.){1,4}?)(?=layers\.0\.blocks\.0\.|patch_embed\.|stages?\.0\.|layer1\.0\.|conv1\.|body\.)"
)


def unsupported_kind(state: Mapping[str, Tensor]) -> str | None:
    """The name of an unsupported model, with an article and a remedy; None if it may be a Swin classifier."""
    if _is_video(state):
        return "a Video Swin: not supported"
    keys = "\n".join(state)
    if what := _named(_RELATIVES, keys):
        advice = " as a classifier, but as a backbone, by ‹output_kind› features" if what == _OPENMMLAB else ""
        return f"{what}: not supported{advice}"
    if kind := larger_model(state):
        backbone = _backbone(state)
        advice = "; its backbone is, by ‹output_kind› features" if backbone.startswith("a Swin V") else ""
        return f"{kind} whose backbone is {backbone}: only classifiers are supported{advice}"
    if geometry(state):
        return None
    if (prefix := _prefix(state)) is not None and geometry(inner := below(state, prefix)):
        return f"{_swin(inner)} under {prefix}: save that part alone, without the {prefix} of its keys"
    what = _named(_OTHERS, keys)
    return f"{what}, no Swin" if what else None


def larger_model(state: Mapping[str, Tensor]) -> str | None:
    """The name of a larger model whose backbone may be a Swin; None for any other."""
    keys = "\n".join(state)
    return next((what for what, pattern in _WHOLES.items() if re.search(pattern, keys, re.M)), None)


def described(state: Mapping[str, Tensor]) -> str:
    """The kind of a state_dict, in words; if `unsupported_kind` does not know it: no Swin, and some of its keys."""
    keys = listed((f"{key:.80}" for key in state), 3)
    return unsupported_kind(state) or f"no checkpoint of a Swin Transformer (its keys are {keys})"


def _named(kinds: Mapping[str, Iterable[str]], keys: str) -> str | None:
    return next((what for what, each in kinds.items() if all(re.search(pattern, keys, re.M) for pattern in each)), None)


def _backbone(state: Mapping[str, Tensor]) -> str:
    prefix = _prefix(state)
    if prefix is None:
        return "not known to us"
    inner = below(state, prefix)
    return _swin(inner) if geometry(inner) else _named(_RELATIVES | _OTHERS, "\n".join(inner)) or "not known to us"


def _prefix(state: Mapping[str, Tensor]) -> str | None:
    return next((match[1] for match in map(_BACKBONE.match, state) if match), None)


def _swin(state: Mapping[str, Tensor]) -> str:
    known = geometry(state)
    sizes = ", ".join(f"{key} {known[key]}" for key in ("EMBED_DIM", "DEPTHS", "WINDOW_SIZE") if key in known)
    return f"a Swin {'V2' if known['TYPE'] == 'swinv2' else 'V1'} ({sizes})"


def _is_video(state: Mapping[str, Tensor]) -> bool:
    """Whether a state_dict is a Video Swin's: Swin's names, with patches of several pictures."""
    patches = (x for key, x in state.items() if key.endswith(("patch_embed.proj.weight", "features.0.0.weight")))
    return any(x.ndim == 5 for x in patches) and any("relative_position_bias_table" in key for key in state)
