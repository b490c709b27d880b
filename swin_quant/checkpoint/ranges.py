"""The ranges (`<node>._amax`) of a calibrated checkpoint (docs/reference, section 1.3), and the grids that they fit.

FasterTransformer's files hold one 0-dim float32 per node; a [1] is the same. A weight may have one per output channel:
[out, 1], for a convolution [out, 1, 1, 1]. Our files add `<node>._bounds`, float32 [2], for every activation: both
ends, for grids with a zero point. FasterTransformer's loaders are not strict and ignore it.

A range that `mse` or `entropy` found, or that was learned, fits one number of bits, in int8 or in float8, and clips
wrongly at another. Ranges of `percentile` and `max`, and the maxima of weights, are the same for any number. The run
card has the grid that the ranges were found for.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import BitsRecord
from swin_quant.quant.calibration import Method
from swin_quant.quant.fake_quant import FP8
from swin_quant.quant.passes import choosing_ranges, passes
from swin_quant.quant.policy import Policy, policy_from_dict, settings_for
from swin_quant.quant.quantizer import Role, named_nodes
from swin_quant.quant.range_methods import RANGE_METHODS

LEARNED = "learned"
OF_BITS = (
    *(name for name, method in RANGE_METHODS.items() if method.depends_on_bits),
    LEARNED,
    *(name for name, one in passes().items() if one.sets_ranges),
)
"""Methods whose ranges depend on the number of bits."""
SUFFIX, BOUNDS = "._amax", "._bounds"


@dataclass(frozen=True)
class Origin:
    """The method that found a node's range, for how many bits (None: any), and for which format."""

    method: str
    bits: int | None = None
    format: str = "int8"


def bits_record(model: nn.Module, method: Method) -> BitsRecord:
    """The bits of `model`'s activation nodes for a calibration record, once its policy is applied."""
    bits = {name: node.setting.bits for name, node in named_nodes(model).items() if node.role is not Role.GEMM_WEIGHT}
    most = Counter(bits.values()).most_common(1)[0][0]
    return {
        "bits": most,
        "other_bits": {name: count for name, count in bits.items() if count != most},
        "methods": {str(count): method.for_bits(count) for count in sorted(set(bits.values()))},
    }


def origins(model: nn.Module, card: RunCard) -> dict[str, Origin]:
    """Node -> the origin of its range, for the model of a calibrated checkpoint and its card."""
    policy = policy_from_dict(card.policy, f"the run card of {card.name}") if card.policy else None
    settings = settings_for(model, policy) if policy else {}
    trained = card.training.get("ranges") if card.training else None
    fitted = choosing_ranges(card.calibration.get("passes", [])) if card.calibration else []
    found = {}
    for name, node in named_nodes(model).items():
        kind: Literal["weights", "activations"] = "weights" if node.role is Role.GEMM_WEIGHT else "activations"
        setting = settings.get(name)
        method = None
        if setting and trained:  # QAT calibrates the disabled nodes again
            method = trained[kind] if setting.enabled else Method().for_bits(setting.bits)
        if setting and setting.enabled and fitted:
            method = method or fitted[-1]
        if setting and method:
            found[name] = Origin(method, setting.bits, setting.format)
        elif kind == "weights" or card.calibration is None:
            found[name] = Origin("max")
        else:
            record = card.calibration
            bits = record.get("other_bits", {}).get(name, record.get("bits"))
            method = record.get("methods", {}).get(str(bits), record["method"])
            found[name] = Origin(method, bits, setting.format) if setting else Origin(method, bits)
    return found


def check_bits(model: nn.Module, card: RunCard | None, policies: Sequence[Policy], checkpoint: str) -> None:
    """UsageError if a policy gives a node another grid than its range was found for, and the range depends on it.

    It warns if the range does not depend on the grid, and if only the policy's bits are known, which are not 8.
    """
    found = origins(model, card) if card and card.calibration else None
    for policy in policies:
        settings = settings_for(model, policy).items()
        asked = {name: setting for name, setting in settings if setting.enabled and setting.amax is None}
        if found is None:
            if other := sorted({setting.bits for setting in asked.values()} - {8}):
                unknown = "no run card says for how many bits its ranges were found"
                log.warning("%s: %s: policy %s has %s", checkpoint, unknown, policy.name, listed(map(str, other)))
            continue
        others = {
            name: origin
            for name, setting in asked.items()
            if (origin := found[name]).bits not in (None, setting.bits)
            or (origin.format != setting.format and origin.method in OF_BITS)
        }
        if not others:
            continue
        wrong = {name: origin for name, origin in others.items() if origin.method in OF_BITS}
        name, origin = next(iter((wrong or others).items()))
        count, setting, is_learned = len(wrong or others), asked[name], origin.method == LEARNED
        there, here = ("float8" if one.format == FP8 else f"{one.bits} bits" for one in (origin, setting))
        how = f"{'learned' if is_learned else f'found by {origin.method}'} for {there}"
        said = f"{checkpoint}: {count} of its ranges are {how}, and policy {policy.name} has {here}"
        if wrong:
            remedy = "finetune" if is_learned else "calibrate the float checkpoint"
            raise UsageError(f"{said} at {name}: {remedy} with these bits")
        log.warning(f"{said}: usable, but `calibrate` with these bits finds better ones")


def is_range(key: str) -> bool:
    """Whether a key of a state_dict is a node's range."""
    return key.endswith((SUFFIX, BOUNDS))


def checked_ranges(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Key -> range, float32, for the nodes of `model` whose range is in `state`; all faults are one error.

    A range may be absent only where the policy leaves its node off, and the lower end where the node is symmetric.
    """
    nodes = named_nodes(model)
    faults: dict[str, list[str]] = defaultdict(list)
    on = {name: node.setting for name, node in nodes.items() if node.setting.enabled}
    faults["missing"] = [name for name in on if name + SUFFIX not in state]
    without = [name for name, setting in on.items() if not setting.symmetric and name + BOUNDS not in state]
    faults["without the lower end that a zero point needs (_bounds)"] = without
    ranges: dict[str, Tensor] = {}
    for key, value in state.items():
        if not is_range(key):
            continue
        name, are_ends = key.rpartition(".")[0], key.endswith(BOUNDS)
        is_weight = name in nodes and nodes[name].role is Role.GEMM_WEIGHT
        weight = model.get_parameter(f"{name.rpartition('.')[0]}.weight") if is_weight else None
        if name not in nodes or (are_ends and is_weight):
            faults["of no node of this model"].append(name)
        elif fault := _find_fault(value, are_ends, weight):
            faults[fault].append(name)
        else:
            ranges[key] = value.float().reshape(()) if value.numel() == 1 else value.float()
    if text := "; ".join(f"{len(names)} {fault}: {listed(names)}" for fault, names in faults.items() if names):
        raise SwinQuantError(f"{path}: its ranges (_amax) cannot be used: {text}; calibrate the model again")
    return ranges


def assign_ranges(model: nn.Module, ranges: Mapping[str, Tensor]) -> None:
    """Give every node its range on the model's device; a node without one forgets what it had."""
    device = next(model.parameters()).device
    on_device = {key: value.to(device) for key, value in ranges.items()}
    for name, node in named_nodes(model).items():
        node.amax, node.bounds = on_device.get(name + SUFFIX), on_device.get(name + BOUNDS)


def _find_fault(amax: Tensor, are_ends: bool, weight: Tensor | None) -> str | None:
    """The fault of a node's range or of its two ends; a range per output channel needs the `weight` of its layer."""
    shape = tuple(amax.shape)
    if are_ends:
        if shape != (2,) or not amax.is_floating_point():
            return "not two floating point numbers (_bounds)"
        low, high = amax.float().tolist()
        return None if -math.inf < low <= 0 <= high < math.inf and low < high else "not around zero (_bounds)"
    if amax.numel() != 1 and (weight is None or shape != (len(weight), *[1] * (weight.dim() - 1))):
        return f"of the wrong shape {list(amax.shape)}"
    if not amax.is_floating_point():
        return f"of {amax.dtype}, not floating point"
    return None if (amax.float().isfinite() & (amax > 0)).all() else "not positive and finite"
