"""A Swin inside a larger model's file: a detector, a segmenter, timm's `features_only`, OpenMMLab, transformers.

Microsoft's detection and segmentation code names parts as its classifiers do, under `backbone.`, with a norm for each
output. OpenMMLab (mmdetection, mmsegmentation, mmpretrain) has names of its own, and its patch merging reads the four
neighbours as `nn.Unfold` lays them out: channel by channel, each in the order (0, 0), (0, 1), (1, 0), (1, 1).
transformers' SwinBackbone has its norms beside the Swin, `hidden_states_norms.stage1`; MaskFormer's counts from 0.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from swin_quant.base.errors import listed
from swin_quant.base.progress import log
from swin_quant.checkpoint.names import WRAPPER, below, renamed, to_microsoft
from swin_quant.checkpoint.opened import VERSIONS, Weights
from swin_quant.checkpoint.roots import choose_set
from swin_quant.config.outputs import DETECTION, EACH, MMPRETRAIN

_ENTRANCE = re.compile(r"(.*?)(patch_embed\.proj(ection)?|embeddings\.patch_embeddings\.projection)\.weight")
_OUTPUT_NORM = re.compile(r"norm(\d)\.weight")
_STATE_NORM = re.compile(r"(?:.*\.)?hidden_states_norms\.(stage)?(\d)\.(weight|bias)")
_OPENMMLAB = (
    (r"^patch_embed\.projection\.", "patch_embed.proj."),
    (r"^stages\.", "layers."),
    (r"\.attn\.w_msa\.", ".attn."),
    (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
    (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
)
_MERGED = re.compile(r"(layers\.\d+\.downsample\.)(reduction\.weight|norm\.(weight|bias))")
_LARGER = re.compile(  # parts of detectors and segmenters
    rf"({WRAPPER}|detector\.)*(neck|rpn|rpn_head|roi_head|bbox_head|mask_head|query_head|query_embed(ding)?|"
    r"\w*(decode|auxiliary|semantic|panoptic)_head)\."
)
_MMPRETRAIN_VERSION = 3
_OURS_IN_THEIRS = [0, 2, 1, 3]  # place of our (0, 0), (1, 0), (0, 1), (1, 1) in the order of nn.Unfold


def as_backbone(weights: Weights, warns: bool = False) -> tuple[Weights, dict[str, Any]]:
    """The Swin in a file under Microsoft's names, and the keys of MODEL.FEATURES that the file determines.

    `warns`: log a warning where the rule for windows is assumed. Other parts (a neck, heads) are left out and logged. A
    classifier's file comes back unchanged. Of several backbones, `weights.asked` chooses (MoBY's `encoder`, beside its
    momentum encoder `encoder_k`); SwinQuantError where it does not.
    """
    found = sorted({match[1] for match in map(_ENTRANCE.fullmatch, weights.state) if match})
    prefix = found[0] if found else ""
    if len(found) > 1:
        inside = {root[:-1]: below(weights.state, root) for root in found}
        name = choose_set(weights.source.path, inside, weights.asked)
        prefix = f"{name}." if name else ""
    state = below(weights.state, prefix)
    norms = {key: match for key in weights.state if (match := _STATE_NORM.fullmatch(key))}
    if beside := [key for key in weights.state if not key.startswith(prefix) and key not in norms]:
        log.info("%s: the backbone is %s*, left out: %s", weights.source.path, prefix, listed(beside, 3))
    state = {key: value for key, value in state.items() if f"{prefix}{key}" not in norms}
    is_openmmlab = any(".attn.w_msa." in key for key in state)
    state, convention = to_microsoft(_from_openmmlab(state) if is_openmmlab else state)
    for key, match in norms.items():
        stage = int(match[2]) - bool(match[1])
        state[f"norm{stage}.{match[3]}"] = weights.state[key]
    keys: dict[str, Any] = {}
    if stages := sorted(int(match[1]) for match in map(_OUTPUT_NORM.fullmatch, state) if match):
        keys |= {"MODEL.FEATURES.STAGES": stages, "MODEL.FEATURES.NORM": EACH}
    if stages or is_openmmlab:
        keys["MODEL.FEATURES.WINDOWS"] = _mm_windows(weights, state, stages, warns) if is_openmmlab else DETECTION
    if prefix or norms or is_openmmlab:
        named = "OpenMMLab" if is_openmmlab else convention
        source = replace(weights.source, format=f"{weights.source.format}, backbone of {named} names")
        weights = replace(weights, source=source)
    return replace(weights, state=state), keys


def as_embedding(weights: Weights) -> Weights:
    """The Swin in a file as `as_backbone` finds it, with the norm of its last stage as the final one."""
    found, _ = as_backbone(weights)
    last = max((int(key.split(".")[1]) for key in found.state if re.match(r"layers\.\d+\.", key)), default=0)
    state = {re.sub(rf"^norm{last}\.", "norm.", key): value for key, value in found.state.items()}
    return replace(found, state={key: value for key, value in state.items() if not re.match(r"norm\d\.", key)})


def _mm_windows(weights: Weights, state: Mapping[str, Tensor], stages: list[int], warns: bool) -> str:
    """How the library that wrote a file cuts maps: mmpretrain has V2, classifiers, and by default the last output.

    A V1 backbone alone has the same names in all three libraries. mmpretrain's module has version 3 in the metadata of
    its state_dict, the others' 1; a file without metadata is taken for mmpretrain's, with a warning.
    """
    whole = weights.raw or weights.state
    if versions := weights.source.notes.get(VERSIONS):
        return MMPRETRAIN if _MMPRETRAIN_VERSION in versions.values() else DETECTION
    if any(key.endswith((".logit_scale", "head.fc.weight")) for key in whole):
        return MMPRETRAIN
    if any(map(_LARGER.match, whole)):
        return DETECTION
    if stages == [max(int(key.split(".")[1]) for key in state if key.startswith("layers."))]:
        return MMPRETRAIN
    if warns:
        alike = "mmpretrain, mmdetection and mmsegmentation name a backbone alike: it is taken for mmpretrain's"
        log.warning("%s: %s; for the others set MODEL.FEATURES.WINDOWS detection", weights.source.path, alike)
    return MMPRETRAIN


def _from_openmmlab(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Swin of OpenMMLab under Microsoft's names, the neighbours of patch merging in its order."""
    found = renamed(state, "OpenMMLab", _OPENMMLAB)
    reductions = {key: x for key, x in found.items() if key.endswith("downsample.reduction.weight") and x.ndim == 2}
    for key, value in found.items():
        match = _MERGED.fullmatch(key)
        reduction = reductions.get(f"{match[1]}reduction.weight") if match else None
        width = 0 if reduction is None else reduction.shape[1]
        # The last dimension holds the four neighbours; V2's norm comes after the reduction and has fewer
        if width and value.ndim and value.shape[-1] == width and width % 4 == 0:
            # [..., C * 4] of nn.Unfold -> [..., 4 * C] of Microsoft
            neighbours = value.unflatten(-1, (-1, 4))[..., _OURS_IN_THEIRS]
            found[key] = neighbours.transpose(-1, -2).flatten(-2)
    return found
