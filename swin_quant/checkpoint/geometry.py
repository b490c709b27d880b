"""The geometry of a Swin in a state_dict, by its names and shapes.

The geometry is in the configuration's keys (docs/reference, sections 1.2 and 8), so that a checkpoint which does not
fit a model can be diagnosed: a V1 file, another width, another window. Keys that no tensor determines are absent.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from swin_quant.base.errors import listed

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


_FAMILY = {"swin": "Swin V1 (TYPE swin)", "swinv2": "Swin V2 (TYPE swinv2)"}


def stage_windows(state: Mapping[str, Tensor], stages: Sequence[int]) -> list[int | None]:
    """The window of each stage, clipped to its map, from any of its position tables; None if it is no square."""
    found: list[int | None] = []
    for attention in (f"layers.{stage}.blocks.0.attn." for stage in stages):
        tokens = _shape(state, f"{attention}relative_position_index", 2)
        biases = _shape(state, f"{attention}relative_position_bias_table", 2)
        _, height, width, _ = _shape(state, f"{attention}relative_coords_table", 4) or (0, 0, 0, 0)
        offsets = find_side(biases[0]) if biases else height if height == width else None
        found.append(find_side(tokens[0]) if tokens else (offsets + 1) // 2 if offsets else None)
    return found


def find_side(area: int) -> int | None:
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
            side = find_side(mask[0] * mask[1])
            return side << int(match[1]) if side else None
    for stage, window in enumerate(windows):
        if window and windows[0] and window < windows[0]:
            return window << stage
    positions = _shape(state, "absolute_pos_embed", 3)
    return find_side(positions[1]) if positions is not None else None


def _shape(state: Mapping[str, Tensor], key: str, dimensions: int) -> tuple[int, ...] | None:
    tensor = state.get(key)
    return tuple(tensor.shape) if tensor is not None and tensor.ndim == dimensions else None


def describe(state: Iterable[str]) -> str:
    """What is said of keys that are of no Swin classifier: some of them, and the ways in."""
    inside = "a Swin inside it gives its maps by ‹output_kind› features"
    keys = listed((f"{key:.80}" for key in state), 3)
    return f"no Swin classifier (its keys are {keys}): {inside}; else give ‹cfg› timm:NAME, or its module to `sq.wrap`"
