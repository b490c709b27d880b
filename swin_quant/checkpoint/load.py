"""Load a checkpoint into a model, all or nothing: every fault is found before the first weight changes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.progress import log
from swin_quant.base.reading import reads
from swin_quant.checkpoint.backbones import as_backbone, as_embedding
from swin_quant.checkpoint.geometry import describe, difference, find_side, geometry
from swin_quant.checkpoint.opened import Checkpoint, Source, Weights, open_checkpoint
from swin_quant.checkpoint.ranges import assign_ranges, checked_ranges, is_range
from swin_quant.checkpoint.roots import find_model
from swin_quant.config.defaults import families
from swin_quant.config.outputs import EMBEDDING, FEATURES, LOGITS
from swin_quant.quant.fold import fitted
from swin_quant.quant.layer import all_factors

_BIASES, _ABSOLUTE = "relative_position_bias_table", "absolute_pos_embed"


@reads("checkpoint", lambda model, checkpoint, **named: checkpoint)
def load_float(model: nn.Module, checkpoint: Checkpoint, *, replace_head: bool | None = False) -> Source:
    """Load the weights of a checkpoint (docs/checkpoints.md says which) into `model`, strictly.

    All missing, unexpected and wrongly shaped keys are one error, with a diagnosis; NaN and Inf are refused.
    Half-precision weights become the model's float32. `replace_head` keeps the model's own, newly initialised head and
    ignores the file's; None: errors do not advise it. Ranges (`_amax`) in the file are ignored and the model's are
    forgotten: they belong to other weights.
    """
    read = _read(model, checkpoint)
    weights = _checked_weights(model, read, replace_head, resizes=True)
    model.load_state_dict(weights, strict=False)  # absent keys are derived or replaced, as was checked
    assign_ranges(model, {})
    return read.source


@reads("checkpoint", lambda model, checkpoint, **named: checkpoint)
def load_calibrated(model: nn.Module, checkpoint: Checkpoint) -> Source:
    """Load weights as `load_float` does, and the range of every node: finite, positive, 0-dim, [1] or, for weights,
    [out, 1]. A node that the policy enabled must have one; one that names no node, or is wrong, is an error.
    """
    read = _read(model, checkpoint)
    state, path = read.state, read.source.path
    if not read.source.calibrated:
        raise SwinQuantError(
            f"{path}: is a float checkpoint: it was never calibrated; run `swin-quant calibrate` to get an INT8 one"
        )
    weights = _checked_weights(model, read, replace_head=None)  # its ranges belong to its head
    ranges = checked_ranges(model, state, path)
    model.load_state_dict(weights, strict=False)  # absent keys are derived, as was checked
    assign_ranges(model, ranges)
    return read.source


def _read(model: nn.Module, checkpoint: Checkpoint) -> Weights:
    """The weights of a file that the model needs: without a head for a model without logits; for a backbone, the Swin
    alone.

    They keep the model's own names if more of those fit than Microsoft's.
    """
    read = open_checkpoint(checkpoint).weights(getattr(model, "weights_set", ""))
    wanted = {key for key in model.state_dict() if not is_range(key) and not _is_derived(key)}
    kind = getattr(model, "output_kind", LOGITS)
    named = as_backbone(read)[0] if kind == FEATURES else as_embedding(read) if kind == EMBEDDING else read
    states, lacks = [named.state], not wanted <= named.state.keys()
    if read.raw is not None and (lacks or read.asked):
        states.append(find_model(read.raw, wanted, read.asked, read.source.path))
    if lacks and (convert := getattr(model, "convert_names", None)) is not None:
        states.append(convert(read.state))
    best = max(states, key=lambda state: len(wanted & state.keys()))  # the first of equal ones
    if best is not named.state:
        named = replace(read, state=best)
    if (pattern := getattr(model, "left_out", None)) is None:
        return named
    left = {key: value for key, value in named.state.items() if not re.match(pattern, key)}
    if gone := [key for key in named.state if key not in left and not _is_derived(key) and not is_range(key)]:
        log.info("%s: no part of the %s, left out: %s", read.source.path, model.output_kind, listed(gone, 3))
    return replace(named, state=left)


# First parts of keys that only training needs. Any other key that the model lacks could change what it computes.
_TRAINING_ONLY = re.compile(
    r"(.*_)?(criterion|loss|losses|metrics?|acc|accuracy|auc|ema|optimizer|scheduler|queue|ptr|center|mask_token|"
    r"n_averaged|num_updates|decay|epoch|steps?|iter|count)\d*(_fn)?"
)


def _checked_weights(
    model: nn.Module, read: Weights, replace_head: bool | None, resizes: bool = False
) -> dict[str, Tensor]:
    """The entries of a file that are loaded; their names, shapes, types and values are checked.

    `resizes`: accept tables of positions of another size; not with ranges, which were found at one size.
    """
    state, path = fitted(model, read.state), read.source.path
    skipped = _head() if replace_head else ()
    wanted = {key: value for key, value in model.state_dict().items() if not is_range(key) and key not in skipped}
    stored = {key: value for key, value in state.items() if not is_range(key) and key not in skipped}
    for key, factors in all_factors(model):  # passes add them: expected if the file has them, whatever the model had
        wanted.pop(key, None)
        wanted |= {key: torch.empty(factors.channels)} if key in stored else {}
    if resizes:
        own = {key.partition(".")[0] for key in wanted}
        first = {key: key.partition(".")[0] for key in stored if key not in wanted}
        foreign = [key for key, part in first.items() if part not in own and _TRAINING_ONLY.fullmatch(part)]
        if foreign and all(key in stored or _is_derived(key) or key in _head() for key in wanted):  # a whole model
            log.warning("%s: no part of the model, left out: %s", path, listed(foreign, 3))
            stored = {key: value for key, value in stored.items() if key not in foreign}
        sides = {name: getattr(module, "window_sides", None) for name, module in model.named_modules()}
        grids = {f"{name}.{_BIASES}": (2 * both[0] - 1, 2 * both[1] - 1) for name, both in sides.items() if both}
        stored = _at_model_size(stored, wanted, grids, read.source)
    if faults := {kind: keys for kind, keys in _compare(stored, wanted).items() if keys}:
        diagnosis = _diagnosis(sum(faults.values(), []), stored, wanted, can_replace=replace_head is not None)
        shown = "; ".join(f"{len(keys)} {kind}: {listed(keys, 3)}" for kind, keys in faults.items())
        raise SwinQuantError(f"{path}: does not fit the model: {diagnosis}{shown}")
    for key, value in stored.items():
        if not torch.isfinite(value.float()).all():  # in the model's type
            raise SwinQuantError(f"{path}: {key} holds NaN or Inf: the checkpoint is broken, use another one")
    return {key: value for key, value in stored.items() if not _is_derived(key)}


def _at_model_size(
    stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor], grids: Mapping[str, tuple[int, int]], source: Source
) -> dict[str, Tensor]:
    """`stored` with its position tables resized, without masks and coordinates of other sizes.

    Unchanged if it differs in more than sizes. `grids`: rows and columns of the model's tables of biases, one for each
    offset within its windows; a file's table is square wherever it can be.
    """
    other = [key for key, value in stored.items() if key not in wanted or value.shape != wanted[key].shape]
    if not all(_is_derived(key) or key.endswith((_BIASES, _ABSOLUTE, *_head())) for key in other):
        return dict(stored)
    found, changed, by_timm = dict(stored), [], "timm" in source.format
    for key, value in stored.items():
        shape = wanted[key].shape if key in wanted else torch.Size()
        # [places, heads] or [1, places, channels]; another number of heads or channels is no size
        is_table = key.endswith((_BIASES, _ABSOLUTE)) and 2 <= value.dim() == len(shape) and value.is_floating_point()
        if not is_table or (value.shape[:-2], value.shape[-1]) != (shape[:-2], shape[-1]):
            continue
        after = grids.get(key) or _square(shape[-2])
        before = _square(value.shape[-2]) or (after if value.shape == shape else None)
        if before is None or after is None or before == after:
            continue
        if by_timm and not key.endswith(_ABSOLUTE):
            resize, window = import_timm().layers.resize_rel_pos_bias_table, [(side + 1) // 2 for side in after]
            found[key] = resize(value.float(), new_window_size=tuple(window), new_bias_shape=tuple(shape))
        else:  # as Microsoft's code
            grid = value.float().mT.reshape(1, -1, *before)
            grid = torch.nn.functional.interpolate(grid, size=after, mode="bicubic")
            found[key] = grid.flatten(2)[0].T.contiguous().reshape(shape)
        changed.append(f"{key} {list(value.shape)} to {list(shape)}")
    if changed:
        how = f"interpolated as {'timm' if by_timm else 'Microsoft'}'s code does"
        log.warning("%s: %d tables of positions were %s: %s, ...", source.path, len(changed), how, changed[0])
    if stale := [key for key in other if _is_derived(key)]:
        shown = difference(geometry(stored), geometry(wanted)) or "some windows are of another size"
        log.warning("%s: masks and coordinates are computed anew: %s", source.path, shown)
    return {key: value for key, value in found.items() if key not in stale}


def _square(places: int) -> tuple[int, int] | None:
    return (side, side) if (side := find_side(places)) else None


def _compare(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """How a file differs from a model, by kind: keys, or `key (reason)`."""
    missing = [key for key in wanted if key not in stored and not _is_derived(key)]
    unexpected, unfit = [], []
    for key, value in stored.items():
        if key not in wanted:
            unexpected.append(key)
        elif value.shape != wanted[key].shape:
            unfit.append(f"{key} (is {list(value.shape)}, must be {list(wanted[key].shape)})")
        elif _is_derived(key):
            # Tables of real numbers were computed by other versions of torch, perhaps stored in half precision
            rounding = 8 * torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
            if not torch.allclose(value.double(), wanted[key].cpu().double(), rtol=0.0, atol=rounding):
                unfit.append(f"{key} (other values: another window, image size or pretrained window)")
        elif not value.is_floating_point() and wanted[key].is_floating_point():
            unfit.append(f"{key} (is {value.dtype}, must be floating point)")
    return {"missing": missing, "unexpected": unexpected, "unfit": unfit}


def _is_derived(key: str) -> bool:
    """Whether the configuration determines this buffer: a file may lack it, and must not contradict it."""
    return key.endswith(tuple(end for family in families().values() for end in family.derived))


def _head() -> frozenset[str]:
    return frozenset(key for family in families().values() for key in family.head)


def _count_classes(state: Mapping[str, Tensor]) -> int:
    """The number of classes of the head; 0 without one."""
    return next((len(state[key]) for key in _head() if key in state and state[key].dim() > 1), 0)


def check_head(checkpoint: Checkpoint, cfg: CfgNode) -> None:
    """SwinQuantError where the file's head has another number of classes than the config."""
    theirs = _count_classes(open_checkpoint(checkpoint).weights(cfg.MODEL.WEIGHTS).state)
    if theirs not in (0, cfg.MODEL.NUM_CLASSES) and cfg.MODEL.OUTPUT_KIND == LOGITS:
        raise SwinQuantError(f"{checkpoint}: {_other_head(theirs, cfg.MODEL.NUM_CLASSES, can_replace=True)}")


def _other_head(theirs: int, ours: int, can_replace: bool) -> str:
    said = f"its head has {theirs} classes" if theirs else "it has no head"
    other = f"give ‹opts› MODEL.NUM_CLASSES {theirs}" if theirs else "give ‹output_kind› embedding"
    advice = f": {other}, or pass ‹replace_head› to load the rest and initialise a new head" if can_replace else ""
    return f"{said}, MODEL.NUM_CLASSES is {ours}{advice}"


def _diagnosis(
    faults: Sequence[str], stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor], can_replace: bool
) -> str:
    """The reason for the faults as a sentence, if the shapes show it; else empty."""
    file, model = geometry(stored), geometry(wanted)
    if model and not file:
        return f"it is {describe(stored)}; "
    if all(key.split(" ")[0] in _head() for key in faults):
        return f"{_other_head(_count_classes(stored), _count_classes(wanted), can_replace)}; "
    text = difference(file, model)
    return f"{text}; " if text else ""
