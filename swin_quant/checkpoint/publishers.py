"""The keys in publishers' descriptions, one table a source, with a rule for each key; `published` applies them.

A key without a rule is named in a warning. A processor of transformers resizes, crops, rescales (times
`rescale_factor`, 1 / 255) and normalises, each step as `do_...` says. The last two are one step of ours: a pixel of 0
to 255 becomes (pixel / 255 - MEAN) / STD.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from swin_quant.base.errors import UsageError

_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # PIL's numbers
_WARPS = 384  # from this size on ConvNext's processor crops nothing
_CLASS = re.compile(r"(\w+?)(ImageProcessor|FeatureExtractor)(Fast|Pil)?")

Prepared = tuple[dict[str, Any], dict[str, tuple[str, ...]]]


@dataclass(frozen=True)
class Sets:
    """The publisher's key sets one of our configuration; `{node}` stands for MODEL.SWIN or MODEL.SWINV2."""

    place: str
    read: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Only:
    """The values that our networks and preprocessing support; any other is refused.

    `unless`: the refusal is lifted if the user sets one of these keys.
    """

    values: tuple[Any, ...]
    unless: tuple[str, ...] = ()


Table: TypeAlias = Mapping[str, Sets | Only | None]
HOW_PREPARED = ("TEST.CROP", "TEST.CROP_RATIO", "TEST.SHAPE", "DATA.INTERPOLATION", "DATA.MEAN", "DATA.STD")
FRAMED = ("TEST.CROP", "TEST.SHAPE")


def _known(names: str) -> dict[str, Sets | Only | None]:
    """Keys that have no effect on the computation (training, bookkeeping), or that other functions read."""
    return dict.fromkeys(names.split())


def side(size: Any) -> Any:
    """One number for a square given by one or both sides; height and width in a list; anything else unchanged."""
    if isinstance(size, Mapping) and set(size) == {"height", "width"}:
        size = [size["height"], size["width"]]
    if isinstance(size, list | tuple):
        return size[0] if size and all(each == size[0] for each in size) and len(size) <= 2 else list(size)
    return size


def entries(value: Any) -> Any:
    """A list for a tuple; any other value unchanged."""
    return list(value) if isinstance(value, tuple) else value


_SAME: Final = {  # the architecture, whose keys most publishers share
    "patch_size": Sets("{node}.PATCH_SIZE", side),
    "embed_dim": Sets("{node}.EMBED_DIM"),
    "depths": Sets("{node}.DEPTHS", entries),
    "num_heads": Sets("{node}.NUM_HEADS", entries),
    "window_size": Sets("{node}.WINDOW_SIZE", side),
    "mlp_ratio": Sets("{node}.MLP_RATIO"),
    "qkv_bias": Sets("{node}.QKV_BIAS"),
    "pretrained_window_sizes": Sets("{node}.PRETRAINED_WINDOW_SIZES", entries),
}

# config.json of transformers' Swin and Swinv2. Their exact GELU has two names.
TRANSFORMERS: Table = {
    **_SAME,
    "image_size": Sets("DATA.IMG_SIZE", side),
    "num_channels": Sets("{node}.IN_CHANS"),
    "use_absolute_embeddings": Sets("{node}.APE"),
    "num_labels": Sets("MODEL.NUM_CLASSES"),
    "path_norm": Only((True,)),
    "hidden_act": Only(("gelu", "gelu_python")),
    "layer_norm_eps": Only((1e-5,)),
    "problem_type": Only((None, "single_label_classification"), ("MODEL.OUTPUT_KIND",)),
    "quantization_config": Only((None,)),
    **_known(
        # class names, which `class_names` reads
        "id2label label2id "
        # training, other heads than the classifier's, and values that follow from the keys above
        "attention_probs_dropout_prob hidden_dropout_prob drop_path_rate initializer_range encoder_stride hidden_size "
        "num_layers num_hidden_layers num_attention_heads out_features out_indices stage_names _out_features "
        "_out_indices is_decoder is_encoder_decoder "
        # keys of every model of transformers
        "architectures model_type transformers_version torch_dtype dtype _name_or_path name_or_path _commit_hash "
        "_attn_implementation _attn_implementation_autoset attn_implementation _attn_implementation_internal "
        "_experts_implementation output_attentions output_hidden_states return_dict use_return_dict "
        "chunk_size_feed_forward finetuning_task task_specific_params torchscript use_bfloat16 pruned_heads "
        "tie_weights tie_word_embeddings tie_encoder_decoder tokenizer_class bos_token_id eos_token_id pad_token_id "
        "sep_token_id decoder_start_token_id cross_attention_hidden_size add_cross_attention use_cache prefix "
        "tf_legacy_loss gradient_checkpointing auto_map "
        # text generation, in every config of older versions of transformers
        "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature "
        "top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
        "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id "
        "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
        "begin_suppress_tokens",
    ),
}

# preprocessor_config.json of transformers.
PROCESSOR: Table = {
    **dict.fromkeys(("do_pad", "do_thumbnail", "do_align_long_axis"), Only((None, False), FRAMED)),
    "size_divisor": Only((None,), FRAMED),
    **dict.fromkeys(("do_flip_channel_order", "do_grayscale"), Only((None, False))),
    "rescale_offset": Only((None, False), ("DATA.MEAN", "DATA.STD")),
    **_known(
        # read together by `prepared_by_processor`
        "do_resize size default_to_square crop_pct do_center_crop crop_size do_rescale rescale_factor do_normalize "
        "image_mean image_std resample image_processor_type feature_extractor_type "
        "do_convert_rgb data_format input_data_format device disable_grouping return_tensors pad_size image_seq_length "
        "include_top do_reduce_labels processor_class auto_map _valid_processor_keys _processor_class "
        "image_processor_class transformers_version",
    ),
}

# timm's description of weights: `pretrained_cfg`, or in older files all of config.json.
TIMM: Table = {
    "crop_mode": Only((None, "center", "squash"), FRAMED),
    "crop_border_pixels": Only((None, 0), FRAMED),
    "num_classes": Sets("MODEL.NUM_CLASSES"),
    "global_pool": Only((None, "avg")),
    "label_offset": Only((None, 0)),
    **_known(
        "input_size crop_pct interpolation mean std labels label_names label_descriptions "
        "architecture model_args pretrained_cfg url file state_dict hf_hub_id hf_hub_filename source tag custom_load "
        "test_input_size min_input_size fixed_input_size test_crop_pct pool_size test_pool_size num_features "
        "first_conv classifier license description origin_url paper_name paper_ids notes "
        "model_type architectures torch_dtype dtype transformers_version initializer_range do_pooling problem_type",
    ),
}

# Arguments of functions that build a Swin: timm's `model_args`, Microsoft's own classes.
ARGUMENTS: Table = {
    **_SAME,
    "img_size": Sets("DATA.IMG_SIZE", side),
    "in_chans": Sets("{node}.IN_CHANS"),
    "num_classes": Sets("MODEL.NUM_CLASSES"),
    "qk_scale": Sets("{node}.QK_SCALE"),
    "ape": Sets("{node}.APE"),
    "patch_norm": Sets("{node}.PATCH_NORM"),
    "act_layer": Only((None, "gelu")),
    "norm_layer": Only((None, "layernorm", "LayerNorm")),
    "global_pool": Only((None, "avg")),
    "head_dim": Only((None,)),
    "always_partition": Only((None, False)),
    **_known(
        "drop_rate proj_drop_rate attn_drop_rate drop_path_rate weight_init use_checkpoint fused_window_process "
        "strict_img_size dynamic_img_size embed_layer device dtype",
    ),
}

# Microsoft's configuration tree: the section of the model's TYPE, and dotted keys beside it.
MICROSOFT: Table = {
    **{key.upper(): rule for key, rule in {**ARGUMENTS, **_SAME}.items() if isinstance(rule, Sets)},
    **{key: Sets(key, entries) for key in (*HOW_PREPARED, "DATA.IMG_SIZE", "MODEL.TYPE", "MODEL.NUM_CLASSES")},
    "NORM_BEFORE_MLP": Only((None, "ln")),
    **_known(
        "MODEL.NAME MODEL.PRETRAINED MODEL.RESUME MODEL.DROP_RATE MODEL.DROP_PATH_RATE MODEL.LABEL_SMOOTHING "
        "MODEL.WEIGHTS MODEL.OUTPUT_KIND MODEL.PRETRAINED_TYPE "
        "DATA.BATCH_SIZE DATA.DATA_PATH DATA.DATASET DATA.ZIP_MODE DATA.CACHE_MODE DATA.PIN_MEMORY DATA.NUM_WORKERS "
        "DATA.MASK_PATCH_SIZE DATA.MASK_RATIO DATA.DEBUG DATA.UPRIGHT DATA.SCORED TEST.SEQUENTIAL TEST.SHUFFLE",
    ),
}


# Defaults of transformers' processors: of all, and of each by the name of its class, less ImageProcessor or
# FeatureExtractor. With a crop_pct small pictures are cropped, and large ones squashed.
_USUAL: Mapping[str, Any] = {
    "do_resize": True,
    "size": 224,
    "default_to_square": True,  # if a size is one number
    "do_center_crop": False,
    "crop_size": 224,
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_SHORTEST = {"size": {"shortest_edge": 224}, "default_to_square": False, "do_center_crop": True}
_CLIP = {
    **_SHORTEST,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "ViT": {"resample": 2},
    "DeiT": {"size": 256, "do_center_crop": True},
    "Bit": _CLIP,
    "CLIP": _CLIP,
    "ConvNext": {"size": {"shortest_edge": 384}, "default_to_square": False, "crop_pct": 224 / 256},
    "MobileNetV2": {**_SHORTEST, "size": {"shortest_edge": 256}, "resample": 2},
}


def prepared_by_processor(description: Mapping[str, Any], where: str) -> Prepared:
    """Dotted keys -> values, and refusals -> the keys that lift them, of a preprocessor_config.json called `where`."""
    name = description.get("image_processor_type") or description.get("feature_extractor_type") or "ViTImageProcessor"
    match = _CLASS.fullmatch(str(name))
    own = _PROCESSORS.get(match[1]) if match else None
    if own is None:
        return {}, {f"{where}: {name!r:.60} is no processor that is known here": ("TEST.CROP",)}
    options = {**_USUAL, **own, **{key: value for key, value in description.items() if value is not None}}
    method = options["resample"]
    keys = {"DATA.INTERPOLATION": _RESAMPLING.get(method, method) if type(method) is int else method}
    keys |= _levels(options, where)
    frame = _frame(options, warps="crop_pct" in own)
    return (keys, {f"{where}: {frame}": FRAMED}) if isinstance(frame, str) else (keys | frame, {})


def _levels(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """MEAN and STD of rescaling by k / 255 and of normalising, (k * pixel / 255 - mean) / std."""
    factor = options["rescale_factor"] if options["do_rescale"] else 1
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        raise UsageError(f"{where}: rescale_factor must be a positive number, not {factor!r:.60}")
    scale = 1.0 if math.isclose(255 * factor, 1, rel_tol=1e-9) else 255 * factor
    values = (options["image_mean"], options["image_std"]) if options["do_normalize"] else (0.0, 1.0)
    mean, std = ([each] * 3 if type(each) in (int, float) else entries(each) for each in values)
    are_numbers = all(isinstance(x, list) and all(type(each) in (int, float) for each in x) for x in (mean, std))
    if scale == 1 or not are_numbers:
        return {"DATA.MEAN": mean, "DATA.STD": std}  # other types are refused when the keys are set
    return {"DATA.MEAN": [value / scale for value in mean], "DATA.STD": [value / scale for value in std]}


def _frame(options: Mapping[str, Any], warps: bool) -> dict[str, Any] | str:
    """The input size, and the keys that resize and crop a picture to it; or why that is not supported."""
    crop = side(options["crop_size"]) if options["do_center_crop"] else None
    if not options["do_resize"]:
        return "do_resize is false, and pictures of any other size are resized here"
    size = options["size"]
    if type(size) is int and not options["default_to_square"]:
        size = {"shortest_edge": size}
    squashed = not (isinstance(size, Mapping) and {key for key in size if size[key] is not None} == {"shortest_edge"})
    resized = side(size) if squashed else size["shortest_edge"]
    if warps and not squashed and type(resized) is int:
        if resized < _WARPS:
            crop, resized = resized, int(resized / options["crop_pct"])
        else:
            crop, squashed = None, True
    if type(resized) is not int or not 0 < resized < 2**16:
        return f"size {size!r:.80} is no square and no shorter side, as pictures are resized here"
    if crop is None and not squashed:
        return f"size {size!r:.80} without do_center_crop keeps the shape of pictures, and the input is a square"
    if crop is None or (crop == resized and squashed):
        return {"DATA.IMG_SIZE": resized, "TEST.CROP": False, "TEST.SHAPE": "square"}
    if type(crop) is not int or not 0 < crop <= resized:
        return f"crop_size {crop!r:.80} is no square inside of the {resized} that pictures are resized to"
    if squashed and (resized - crop) % 4 == 3:
        return f"crop_size {crop} lies half a pixel off the centre of the square of {resized}"
    shape, ratio = "squashed" if squashed else "floored", crop / resized
    ratio = ratio if int(crop / ratio) == resized else math.nextafter(ratio, 0)  # rounding must not lose a pixel
    return {"DATA.IMG_SIZE": crop, "TEST.CROP": True, "TEST.CROP_RATIO": ratio, "TEST.SHAPE": shape}
