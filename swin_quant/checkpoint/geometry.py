"""What a state_dict is, by its names and shapes: a Swin of some geometry, or what people mistake for one.

The geometry is in the configuration's keys (docs/reference, sections 1.2 and 8), so that a checkpoint which does not
fit a model can be diagnosed: a V1 file, another width, another window. Keys that no tensor determines are absent.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from swin_quant.base.errors import listed
from swin_quant.checkpoint.names import below, to_microsoft
from swin_quant.config.sides import clipped, compute_map_size, sides

_BLOCK = re.compile(r"layers\.(\d{1,2})\.blocks\.(\d{1,4})\.", re.ASCII)
_FIRST_ATTENTION = "layers.0.blocks.0.attn."
_MASK = re.compile(r"layers\.(\d{1,2})\.blocks\.\d{1,4}\.attn_mask", re.ASCII)

Geometry: TypeAlias = dict[str, Any]  # str, int, float, bool or list[int], as the key has it


def geometry(state: Mapping[str, Tensor]) -> Geometry:
    """Configuration key -> value, for the keys that the tensors of a state_dict (Microsoft's names) determine."""
    found: Geometry = {}
    depths: dict[int, int] = {}
    for block in filter(None, map(_BLOCK.match, state)):
        stage, index = int(block[1]), int(block[2])
        depths[stage] = max(depths.get(stage, 0), index + 1)
    if not depths:
        return found
    stages = sorted(depths)
    found["TYPE"] = "swinv2" if f"{_FIRST_ATTENTION}logit_scale" in state else "swin"
    if (proj := _shape(state, "patch_embed.proj.weight", 4)) is not None:
        found["EMBED_DIM"], found["IN_CHANS"], found["PATCH_SIZE"] = proj[:3]
    found["DEPTHS"] = [depths[stage] for stage in stages]
    heads = []
    for attention in (f"layers.{stage}.blocks.0.attn." for stage in stages):
        table = _shape(state, f"{attention}relative_position_bias_table", 2)
        scale = _shape(state, f"{attention}logit_scale", 3)
        heads += [table[1]] if table is not None else [scale[0]] if scale is not None else []
    if len(heads) == len(stages):
        found["NUM_HEADS"] = heads
    windows = stage_windows(state, stages)
    if windows[0] is not None:
        found["WINDOW_SIZE"] = windows[0]
    if (ratio := _mlp_ratio(state, stages)) is not None:
        found["MLP_RATIO"] = ratio
    found["QKV_BIAS"] = any(f"{_FIRST_ATTENTION}{name}" in state for name in ("qkv.bias", "q_bias"))
    found["APE"] = "absolute_pos_embed" in state
    found["PATCH_NORM"] = "patch_embed.norm.weight" in state
    pretrained = [_pretrained_window(state, stage) for stage in stages]
    if None not in pretrained:
        found["PRETRAINED_WINDOW_SIZES"] = pretrained
    if "PATCH_SIZE" in found and (side := _first_side(state, windows)) is not None:
        found["IMG_SIZE"] = side * found["PATCH_SIZE"]
    if (head := _shape(state, "head.weight", 2)) is not None:
        found["NUM_CLASSES"] = head[0]
    return found


def difference(file: Geometry, model: Geometry) -> str:
    """Every key that both have with different values, as a sentence; empty if there is none."""
    keys = differing(file, model)
    if "TYPE" in keys:
        return f"it is a {_FAMILY[file['TYPE']]} checkpoint and the configuration is of {_FAMILY[model['TYPE']]}"
    ours = ", ".join(f"{key} {model[key]}" for key in keys)
    theirs = ", ".join(f"{key} {file[key]}" for key in keys)
    return f"the file has {theirs}, the configuration {ours}" if keys else ""


def differing(one: Geometry, other: Geometry) -> list[str]:
    """The keys that both have with different values."""
    return [key for key in other if key in one and one[key] != other[key]]


def changes_model(base: Geometry, key: str, value: Any) -> bool:
    """Whether the model of geometry `base` computes something else with this value of `key`."""
    try:
        return _effective({**base, key: value}) != _effective(base)
    except (ArithmeticError, TypeError, ValueError):  # no model has this value
        return True


def _effective(raw: Geometry) -> Geometry:
    """A geometry in normal form, equal for models that compute the same.

    Windows are clipped to their maps, pretrained windows kept if they differ from the stage's, hidden widths replace
    their ratio, and the scale of queries is filled in.
    """
    used = dict(raw)
    stages = range(len(raw.get("DEPTHS", ())))
    patch, width, heads = raw.get("PATCH_SIZE"), raw.get("EMBED_DIM"), raw.get("NUM_HEADS")
    if window := raw.get("WINDOW_SIZE"):
        maps = [compute_map_size(raw["IMG_SIZE"], patch, i) if patch and "IMG_SIZE" in raw else window for i in stages]
        windows = [clipped(window, tokens) for tokens in maps]
        used["WINDOW_SIZE"] = windows[0] if windows else window
        if len(raw.get("PRETRAINED_WINDOW_SIZES", ())) == len(stages):
            pretrained = zip(raw["PRETRAINED_WINDOW_SIZES"], windows, strict=True)
            used["PRETRAINED_WINDOW_SIZES"] = [sides(size or window) for size, window in pretrained]
    if width and "MLP_RATIO" in raw:
        used["MLP_RATIO"] = [int((width << stage) * raw["MLP_RATIO"]) for stage in stages]
    if width and heads and len(heads) == len(stages):
        own = [((width << stage) // heads[stage]) ** -0.5 for stage in stages]
        used["QK_SCALE"] = [raw.get("QK_SCALE") or scale for scale in own]
    return used


_FAMILY = {"swin": "Swin V1 (TYPE swin)", "swinv2": "Swin V2 (TYPE swinv2)"}


def stage_windows(state: Mapping[str, Tensor], stages: Sequence[int]) -> list[int | None]:
    """The window of each stage, clipped to its map, from any of its position tables; None if it is no square."""
    found: list[int | None] = []
    for attention in (f"layers.{stage}.blocks.0.attn." for stage in stages):
        tokens = _shape(state, f"{attention}relative_position_index", 2)
        biases = _shape(state, f"{attention}relative_position_bias_table", 2)
        _, height, width, _ = _shape(state, f"{attention}relative_coords_table", 4) or (0, 0, 0, 0)
        offsets = _root(biases[0]) if biases else height if height == width else None
        found.append(_root(tokens[0]) if tokens else (offsets + 1) // 2 if offsets else None)
    return found


def _root(area: int) -> int | None:
    """The side of a square; None for an area that is none."""
    side = math.isqrt(area)
    return side if side * side == area else None


def _mlp_ratio(state: Mapping[str, Tensor], stages: list[int]) -> float | None:
    """The ratio that gives every stage's hidden width when rounded down, from the widest stage, which is most
    precise."""
    found = (_shape(state, f"layers.{stage}.blocks.0.mlp.fc1.weight", 2) for stage in stages)
    shapes = [shape for shape in found if shape is not None and all(shape)]
    if len(shapes) < len(stages):
        return None
    ratio = shapes[-1][0] / shapes[-1][1]
    exact = all(int(width * ratio) == hidden for hidden, width in shapes)
    return ratio if exact else math.nextafter(ratio, math.inf)


def _pretrained_window(state: Mapping[str, Tensor], stage: int) -> int | None:
    """The window by which a stage's coordinates are divided; 0 if it is the stage's own."""
    table = state.get(f"layers.{stage}.blocks.0.attn.relative_coords_table")
    if table is None or table.ndim != 4 or not table.numel() or not table.is_floating_point():
        return None
    window, last = (table.shape[1] + 1) // 2, float(table[0, -1, -1, 0])  # sign(z) log2(|z| + 1) / 3, z = 8t / (p - 1)
    if window == 1:
        return 2  # one coordinate, which is 0 for any divisor
    if not 1e-3 < last < 4:  # windows of 2 to 1024 stay within
        return None
    pretrained = round(8 * (window - 1) / (2 ** (3 * last) - 1)) + 1
    return 0 if pretrained == window else pretrained


def _first_side(state: Mapping[str, Tensor], windows: list[int | None]) -> int | None:
    """The side of the first map: from a mask, from a window that its map clipped, or from positions of tokens."""
    for key in state:
        if (match := _MASK.fullmatch(key)) and (mask := _shape(state, key, 3)) is not None:
            side = _root(mask[0] * mask[1])
            return side << int(match[1]) if side else None
    for stage, window in enumerate(windows):
        if window and windows[0] and window < windows[0]:
            return window << stage
    positions = _shape(state, "absolute_pos_embed", 3)
    return _root(positions[1]) if positions is not None else None


def _shape(state: Mapping[str, Tensor], key: str, dimensions: int) -> tuple[int, ...] | None:
    tensor = state.get(key)
    return tuple(tensor.shape) if tensor is not None and tensor.ndim == dimensions else None


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
