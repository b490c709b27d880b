"""What a Swin state_dict says about its architecture, in the words of the configuration.

Everything is read from names and shapes (docs/reference, sections 1.2 and 8), so that a checkpoint which does
not fit a model can be told from it: a V1 file, another width, another window. What the tensors do not tell is absent.
"""

import math
import re
from collections.abc import Mapping

from torch import Tensor

_FIRST_ATTENTION = "layers.0.blocks.0.attn."
_BLOCK = re.compile(r"layers\.(\d+)\.blocks\.(\d+)\.")

Geometry = dict[str, str | int | list[int]]


def geometry(state: Mapping[str, Tensor]) -> Geometry:
    """Configuration key -> value, for those that the tensors of a state_dict (Microsoft's names) tell."""
    found: Geometry = {}
    depths: dict[int, int] = {}
    for block in filter(None, map(_BLOCK.match, state)):
        stage, index = int(block[1]), int(block[2])
        depths[stage] = max(depths.get(stage, 0), index + 1)
    if not depths:
        return found
    found["TYPE"] = "swinv2" if f"{_FIRST_ATTENTION}logit_scale" in state else "swin"
    if (proj := _shape(state, "patch_embed.proj.weight", 4)) is not None:
        found["EMBED_DIM"], found["PATCH_SIZE"] = proj[0], proj[2]
    found["DEPTHS"] = [depths[stage] for stage in sorted(depths)]
    heads = [_heads(state, stage) for stage in sorted(depths)]
    if None not in heads:
        found["NUM_HEADS"] = heads
    tokens = _shape(state, f"{_FIRST_ATTENTION}relative_position_index", 2)
    table = _shape(state, f"{_FIRST_ATTENTION}relative_position_bias_table", 2)
    if tokens is not None:
        found["WINDOW_SIZE"] = math.isqrt(tokens[0])
    elif table is not None:
        found["WINDOW_SIZE"] = (math.isqrt(table[0]) + 1) // 2
    mask = _shape(state, "layers.0.blocks.1.attn_mask", 3)
    if mask is not None and "PATCH_SIZE" in found:
        found["IMG_SIZE"] = math.isqrt(mask[0] * mask[1]) * found["PATCH_SIZE"]
    if (head := _shape(state, "head.weight", 2)) is not None:
        found["NUM_CLASSES"] = head[0]
    return found


def difference(file: Geometry, model: Geometry) -> str:
    """`file -> model` for every key on which both speak and disagree; empty when there is none."""
    keys = [key for key in model if key in file and file[key] != model[key]]
    if "TYPE" in keys:
        return f"it is a {_FAMILY[file['TYPE']]} checkpoint and the configuration is of {_FAMILY[model['TYPE']]}"
    ours = ", ".join(f"{key} {model[key]}" for key in keys)
    theirs = ", ".join(f"{key} {file[key]}" for key in keys)
    return f"the file has {theirs}, the configuration {ours}" if keys else ""


_FAMILY = {"swin": "Swin V1 (TYPE swin)", "swinv2": "Swin V2 (TYPE swinv2)"}


def _heads(state: Mapping[str, Tensor], stage: int) -> int | None:
    attention = f"layers.{stage}.blocks.0.attn."
    table = _shape(state, f"{attention}relative_position_bias_table", 2)
    scale = _shape(state, f"{attention}logit_scale", 3)
    return table[1] if table is not None else scale[0] if scale is not None else None


def _shape(state: Mapping[str, Tensor], key: str, dimensions: int) -> tuple[int, ...] | None:
    tensor = state.get(key)
    return tuple(tensor.shape) if tensor is not None and tensor.ndim == dimensions else None
