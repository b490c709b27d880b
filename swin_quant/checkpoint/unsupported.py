"""Recognise by their keys the state dicts that people mistake for a Swin classifier's, and advise what to do
instead."""

import re
from collections.abc import Mapping

from torch import Tensor

from swin_quant.base.errors import listed
from swin_quant.checkpoint.geometry import geometry
from swin_quant.checkpoint.names import below, to_microsoft

_WRAP = " as a file: build it by its own library and give the module to `sq.wrap`"
# What a model is called -> what to do, and patterns that its keys must all have. The first that fits counts.
# Files of a model that torch or PEFT has changed, with the call that undoes it:
_CHANGED = {
    "a pruned model": ("torch.nn.utils.prune.remove(module, 'weight')", r"weight_orig$", r"weight_mask$"),
    "a model with spectral norm": ("torch.nn.utils.remove_spectral_norm(module)", r"weight_orig$", r"weight_u$"),
    "a model with weight norm": ("torch.nn.utils.remove_weight_norm(module)", r"weight_g$", r"weight_v$"),
    "a parametrized model": (
        "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')",
        r"\.parametrizations\.\w+\.original\d*$",
    ),
    "a model with LoRA adapters": ("model.merge_and_unload()", r"\.lora_[AB]\.", r"\.base_layer\."),
    "LoRA adapters without their model": ("PeftModel.from_pretrained(...).merge_and_unload()", r"\.lora_[AB]\."),
    "a model of PEFT": ("model.merge_and_unload()", r"\.modules_to_save\.", r"^base_model\.model\."),
}
_RELATIVES = {
    "a Swin-MLP": ("", r"^layers\.\d+\.blocks\.\d+\.spatial_mlp\."),
    "a Swin-MoE": ("", r"^layers\.\d+\.blocks\.\d+\.mlp\._?moe_layer\."),
    "a SwinIR (image restoration)": (_WRAP, r"\blayers\.\d+\.residual_group\.(blocks|layers)\.", r"^conv_first\."),
    "a Swin2SR of transformers (image restoration)": (
        _WRAP,
        r"^(swin2sr\.)?first_convolution\.",
        r"\bencoder\.stages\.\d+\.layers\.",
    ),
    "the audio encoder of a CLAP": (_WRAP, r"\baudio_encoder\.(\w+\.)*patch_embed\."),
    "a Swin-Unet (segmentation)": ("", r"\blayers_up\.\d+\."),
    "a Swin V2-CR of timm": (
        " as a Swin: timm has it, by ‹cfg› timm:NAME",
        r"^stages\.\d+\.blocks\.\d+\.attn\.meta_mlp\.",
    ),
    "a Swin of torchvision": (_WRAP, r"^features\.\d+\.\d+\.attn\.(relative_position_bias_table|cpb_mlp\.)"),
    "a Swin of OpenMMLab": (
        " as a classifier, but as a backbone, by ‹output_kind› features",
        r"\bstages\.\d+\.blocks\.\d+\.attn\.w_msa\.",
    ),
    "a Swin of TensorFlow or Keras": ("", r"\bswin_transformer_block\w*/"),
    "a Donut or another encoder and decoder": ("", r"^encoder\.encoder\.layers\.\d+\.blocks\.", r"^decoder\."),
}
_WHOLES = {
    "a detector": r"^(neck|rpn|rpn_head|roi_head|roi_heads|bbox_head|mask_head|query_head|proposal_generator|"
    r"box_predictor|class_embed|bbox_embed|class_labels_classifier|bbox_predictor|(\w+\.)?transformer\.decoder)\.",
    "a segmenter": r"^(decode_head|auxiliary_head|segmentation_head|sem_seg_head|panoptic_head|"
    r"(model\.)?pixel_level_module)\.",
}
_OTHERS = {
    "a ViT": ("", r"\bblocks\.\d+\.attn\.qkv\.", r"\b(cls_token|pos_embed)$"),
    "a ViT of transformers": ("", r"^(\w+\.)?encoder\.layer\.\d+\.attention\.attention\."),
    "a ViT of torchvision": ("", r"^encoder\.layers\.encoder_layer_\d+\."),
    "a CLIP": ("", r"\b(visual|vision_model)\b", r"\b(text_model|token_embedding|logit_scale)\b"),
    "a ConvNeXt": ("", r"\b(stages\.\d+\.(blocks\.)?\d+\.(conv_dw|dwconv)|features\.\d+\.\d+\.layer_scale)\b"),
    "a ConvNeXt of transformers": ("", r"^convnext(v2)?\."),
    "a ResNet": ("", r"\blayer1\.0\.conv1\.", r"\blayer1\.0\.bn1\."),
    "a ResNet of transformers": ("", r"^resnet\."),
    "an EfficientNet or MobileNet": ("", r"\bblocks\.\d+\.\d+\.(conv_dw|conv_pw)\."),
    "a MobileNet or another convolutional network of torchvision": ("", r"^features\.\d+\.", r"^classifier\.\d+\."),
    "a YOLO": ("", r"^(model\.)?\d+\.(conv|cv1|m\.0)\."),
    "a diffusion model": ("", r"\b(down_blocks|input_blocks)\.\d+\."),
    "a language model": ("", r"\b(word_embeddings|embed_tokens|wte)\.weight$"),
}
_BACKBONE = re.compile(
    r"^((?:\w+\.){1,4}?)"
    r"(?=layers[._]0\.blocks\.0\.|patch_embed\.|embeddings\.patch|stages?\.0\.|layer1\.0\.|conv1\.|body\.)"
)


def unsupported_kind(state: Mapping[str, Tensor]) -> str | None:
    """The name of an unsupported model, with an article and a remedy; None if it may be a Swin classifier."""
    patches = (x for key, x in state.items() if key.endswith(("patch_embed.proj.weight", "features.0.0.weight")))
    if any(x.ndim == 5 for x in patches) and any("relative_position_bias_table" in key for key in state):
        return "a Video Swin: not supported"  # Swin's names, with patches of several pictures
    keys = "\n".join(state)
    if what := _named(_CHANGED, keys):
        return f"{what}: undo it by {_CHANGED[what][0]}, and save again"
    if what := _named(_RELATIVES, keys):
        return f"{what}: not supported{_RELATIVES[what][0]}"
    prefix = next((match[1] for match in map(_BACKBONE.match, state) if match), None)
    if kind := larger_model(state):
        backbone = None
        if prefix is not None:
            inner = below(state, prefix)
            microsoft, _ = to_microsoft(inner)
            backbone = _swin(microsoft) if geometry(microsoft) else _named(_RELATIVES | _OTHERS, "\n".join(inner))
        backbone = backbone or "not known to us"
        advice = "; its backbone is, by ‹output_kind› features" if backbone.startswith("a Swin V") else ""
        return f"{kind} whose backbone is {backbone}: only classifiers are supported{advice}"
    if geometry(state):
        return None
    if prefix is not None and geometry(inner := below(state, prefix)):
        advice = f"take its maps by ‹output_kind› features, or save that part alone, without the {prefix} of its keys"
        return f"{_swin(inner)} under {prefix}: {advice}"
    what = _named(_OTHERS, keys)
    return f"{what}, no Swin" if what else None


def larger_model(state: Mapping[str, Tensor]) -> str | None:
    """The name of a larger model whose backbone may be a Swin; None for any other."""
    keys = "\n".join(state)
    return next((what for what, pattern in _WHOLES.items() if re.search(pattern, keys, re.M)), None)


def describe(state: Mapping[str, Tensor]) -> str:
    """The kind of a state_dict, in words; if `unsupported_kind` does not know it: no Swin, and some of its keys."""
    keys = listed((f"{key:.80}" for key in state), 3)
    return unsupported_kind(state) or f"no checkpoint of a Swin Transformer (its keys are {keys})"


def _named(kinds: Mapping[str, tuple[str, ...]], keys: str) -> str | None:
    fits = (what for what, (_, *each) in kinds.items() if all(re.search(pattern, keys, re.M) for pattern in each))
    return next(fits, None)


def _swin(state: Mapping[str, Tensor]) -> str:
    known = geometry(state)
    sizes = ", ".join(f"{key} {known[key]}" for key in ("EMBED_DIM", "DEPTHS", "WINDOW_SIZE") if key in known)
    return f"a Swin {'V2' if known['TYPE'] == 'swinv2' else 'V1'} ({sizes})"
