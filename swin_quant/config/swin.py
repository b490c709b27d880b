"""Swin's keys, V1 and V2 (docs/reference, section 7.2), and the values that no Swin can be built from."""

from typing import Annotated, Any

from yacs.config import CfgNode

from swin_quant.base.schema import counted, within
from swin_quant.config.family import Family, check_values, need
from swin_quant.config.outputs import FEATURES, LAST, select_stages
from swin_quant.config.sides import clipped, compute_map_size, shown, sides

_BOTH: dict[str, Any] = {
    "PATCH_SIZE": 4,
    "IN_CHANS": 3,
    "EMBED_DIM": 96,
    "DEPTHS": [2, 2, 6, 2],
    "NUM_HEADS": [3, 6, 12, 24],
    "WINDOW_SIZE": 7,
    "MLP_RATIO": 4.0,
    "QKV_BIAS": True,
    "APE": False,
    "PATCH_NORM": True,
}
# Limits far beyond any Swin: a larger value is a slip, and would take all memory.
_Stages = counted(1, 16)
_KINDS: dict[str, Any] = {
    "PATCH_SIZE": Annotated[int, within(least=1, most=1024)],
    "IN_CHANS": Annotated[int, within(least=1, most=1024)],
    "EMBED_DIM": Annotated[int, within(least=1, most=8192)],
    "DEPTHS": Annotated[list[Annotated[int, within(least=1, most=256)]], _Stages],
    "NUM_HEADS": Annotated[list[Annotated[int, within(least=1, most=4096)]], _Stages],
    "WINDOW_SIZE": Annotated[int, within(least=1, most=1024)],
    "MLP_RATIO": Annotated[float, within(above=0, most=256)],
}
_PER_STAGE = ("DEPTHS", "NUM_HEADS", "PRETRAINED_WINDOW_SIZES")
_DERIVED = ("relative_position_index", "attn_mask", "relative_coords_table")


def _check(cfg: CfgNode, source: str) -> None:
    """Refuse values that no Swin can be built from; `source` is the file that the UsageError names.

    Stage i works at R_i = IMG_SIZE / PATCH_SIZE / 2^i and in windows of min(WINDOW_SIZE, R_i) (docs/reference,
    section 1.2). R_i must be even where patches are merged and, for square pictures, a multiple of its window.
    """
    node = f"MODEL.{cfg.MODEL.TYPE.upper()}"
    swin = cfg.MODEL[cfg.MODEL.TYPE.upper()]
    check_values(_KINDS, swin, source, f"{node}.")
    lists = {f"{node}.{key}": swin[key] for key in _PER_STAGE if key in swin}
    each = ", ".join(f"{key} {entries}" for key, entries in lists.items())
    need(len(set(map(len, lists.values()))) == 1, source, f"one entry a stage is needed in each of {each}")
    pretrained = swin.get("PRETRAINED_WINDOW_SIZES", [])
    problem = f"{node}.PRETRAINED_WINDOW_SIZES is {pretrained}, but each must be 0 (none) or at least 2"
    need(all(window == 0 or window > 1 for window in pretrained), source, problem)
    if cfg.MODEL.OUTPUT_KIND == FEATURES:
        _check_features(cfg, swin, source)
    size, patch, channels = cfg.DATA.IMG_SIZE, swin.PATCH_SIZE, swin.EMBED_DIM
    is_square, size_key = isinstance(size, int), f"DATA.IMG_SIZE {size}"
    whole = not any(side % patch for side in sides(size))
    need(whole, source, f"{size_key} is not a multiple of {node}.PATCH_SIZE {patch}")
    need(is_square or not swin.APE, source, f"{size_key}: absolute positions (APE) are those of square pictures")
    for stage, heads in enumerate(swin.NUM_HEADS):
        tokens = compute_map_size(size, patch, stage)
        windows = clipped(swin.WINDOW_SIZE, tokens)
        here = f"stage {stage}, {shown(tokens)} ({size_key}, {node}.PATCH_SIZE {patch})"
        fits = not is_square or (tokens[0] > 0 and tokens[0] % windows[0] == 0)  # timm pads others
        need(fits, source, f"{node}.WINDOW_SIZE {swin.WINDOW_SIZE} does not divide {here}")
        alone = 1 in windows and "PRETRAINED_WINDOW_SIZES" in swin and swin.PRETRAINED_WINDOW_SIZES[stage] == 0
        need(not alone, source, f"a window of 1 has no relative coordinates: {here}; choose a larger DATA.IMG_SIZE")
        problem = f"{node}.NUM_HEADS {heads} does not divide the {channels} channels of stage {stage}"
        need(channels % heads == 0, source, f"{problem} ({node}.EMBED_DIM {swin.EMBED_DIM} x 2^{stage})")
        last = stage == len(swin.NUM_HEADS) - 1
        even = not any(side % 2 for side in tokens)
        need(last or even, source, f"patches of an odd resolution cannot be merged: {here}")
        channels *= 2


def _check_features(cfg: CfgNode, swin: CfgNode, source: str) -> None:
    """UsageError unless the stages exist, each once and ascending, and the network takes pictures of any size."""
    last, wanted = len(swin.DEPTHS) - 1, select_stages(cfg, len(swin.DEPTHS))
    asked = f"MODEL.FEATURES.STAGES is {list(wanted)}"
    need(max(wanted) <= last, source, f"{asked}, but the model has stages 0 to {last}")
    need(list(wanted) == sorted(set(wanted)), source, f"{asked}: each stage once, in ascending order")
    behind = cfg.MODEL.FEATURES.NORM != LAST or wanted[-1] == last
    need(behind, source, f"MODEL.FEATURES.NORM {LAST} is behind stage {last}, and {asked}")
    need(not swin.APE, source, "absolute positions (APE) fit one size of pictures: no features of such a model")


_POLICY = "ft-mode1"  # FasterTransformer has kernels for these two families alone
SWIN = Family("swin", {**_BOTH, "QK_SCALE": None}, _check, {"QK_SCALE": 1.0}, _DERIVED, policy=_POLICY)
SWINV2 = Family("swinv2", {**_BOTH, "PRETRAINED_WINDOW_SIZES": [0, 0, 0, 0]}, _check, derived=_DERIVED, policy=_POLICY)
