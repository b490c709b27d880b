"""Compare the grid that a checkpoint's ranges were found for, by its run card, with the grid that a policy gives.

A range that `mse` or `entropy` found, or that was learned, fits one number of bits, in int8 or in float8, and clips
wrongly at another. Ranges of `percentile` and `max`, and the maxima of weights, are the same for any number.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from swin_quant.base.errors import UsageError, listed
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import BitsRecord, CalibrationRecord
from swin_quant.quant.calibration import Method
from swin_quant.quant.fake_quant import FP8
from swin_quant.quant.passes import choosing_ranges, passes
from swin_quant.quant.policy import Policy, policy_from_dict, settings_for
from swin_quant.quant.quantizer import Role, named_nodes
from swin_quant.quant.range_methods import RANGE_METHODS
from swin_quant.quant.setting import Setting

LEARNED = "learned"
OF_BITS = (
    *(name for name, method in RANGE_METHODS.items() if method.of_bits),
    LEARNED,
    *(name for name, one in passes().items() if one.of_ranges),
)
"""Methods whose ranges depend on the number of bits."""


@dataclass(frozen=True)
class Origin:
    """The method that found a node's range, for how many bits (None: any), and for which format."""

    method: str
    bits: int | None = None
    format: str = "int8"

    @property
    def grid(self) -> str:
        return _grid_name(self.bits, self.format)

    def is_for(self, setting: Setting) -> bool:
        """Whether the range fits a node's bits, and its format if that matters."""
        return self.bits in (None, setting.bits) and (self.format == setting.format or self.method not in OF_BITS)


def bits_record(model: nn.Module, method: Method) -> BitsRecord:
    """The bits of `model`'s activation nodes for a calibration record, once its policy is applied."""
    bits = {name: node.setting.bits for name, node in named_nodes(model).items() if node.role is not Role.GEMM_WEIGHT}
    most = Counter(bits.values()).most_common(1)[0][0]
    found: BitsRecord = {
        "bits": most,
        "other_bits": {name: count for name, count in bits.items() if count != most},
        "methods": {str(count): method.for_bits(count) for count in sorted(set(bits.values()))},
    }
    if method.of_nodes is None:
        return found
    return {**found, "node_methods": dict(method.of_nodes), "tried_percentile": method.percentile}


def origins(model: nn.Module, card: RunCard) -> dict[str, Origin]:
    """Node -> the origin of its range, for the model of a calibrated checkpoint and its card.

    In older cards without recorded bits, ranges are for the bits of the policy.
    """
    policy = policy_from_dict(card.policy, f"the run card of {card.name}") if card.policy else None
    settings = settings_for(model, policy) if policy else {}
    trained = card.training.get("ranges") if card.training else None
    fitted = choosing_ranges(card.calibration.get("passes", [])) if card.calibration else []
    found = {}
    for name, node in named_nodes(model).items():
        kind: Literal["weights", "activations"] = "weights" if node.role is Role.GEMM_WEIGHT else "activations"
        setting = settings.get(name)
        if trained and setting and not setting.enabled:
            # QAT calibrates the disabled nodes again
            found[name] = Origin(Method().for_bits(setting.bits), setting.bits, setting.format)
        elif trained and setting and (method := trained[kind]):
            found[name] = Origin(method, setting.bits, setting.format)
        elif fitted and setting and setting.enabled:
            found[name] = Origin(fitted[-1], setting.bits, setting.format)
        elif kind == "weights" or card.calibration is None:
            found[name] = Origin("max")
        else:
            found[name] = _calibrated(card.calibration, name, setting)
    return found


def _calibrated(record: CalibrationRecord, name: str, setting: Setting | None) -> Origin:
    bits = record.get("other_bits", {}).get(name, record.get("bits", setting.bits if setting else None))
    of_bits = record.get("methods", {}).get(str(bits), record["method"])
    method = record.get("node_methods", {}).get(name, of_bits)
    return Origin(method, bits, setting.format) if setting else Origin(method, bits)


def check_bits(model: nn.Module, card: RunCard | None, policies: Sequence[Policy], checkpoint: str) -> None:
    """UsageError if a policy gives a node another grid than its range was found for, and the range depends on it.

    It warns if the range does not depend on the grid; if the bits of the ranges are unknown and the policy's are not 8;
    and if a pass rounded weights for another granularity or format.
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
        if card and (names := rounded_otherwise(model, card, policy)):
            log.warning(
                f"{checkpoint}: {choosing_ranges(card.kept_passes)[-1]} rounded weights for other grids than policy "
                f"{policy.name} has ({listed(names, 2)}): they are rounded once more, and `calibrate` under it finds "
                "better ones"
            )
        others = {name: found[name] for name, setting in asked.items() if not found[name].is_for(setting)}
        wrong = {name: origin for name, origin in others.items() if origin.method in OF_BITS}
        if not others:
            continue
        name, origin = next(iter((wrong or others).items()))
        here = _grid_name(asked[name].bits, asked[name].format)
        if wrong:
            remedy = "finetune" if origin.method == LEARNED else "calibrate the float checkpoint"
            if origin.method in RANGE_METHODS:
                remedy = "calibrate (from ‹statistics›, without pictures)"
            raise UsageError(
                f"{checkpoint}: {_origin_text(wrong, origin)} for {origin.grid}, and policy {policy.name} "
                f"has {here} at {name}: {remedy} with these bits"
            )
        log.warning(
            f"{checkpoint}: {_origin_text(others, origin)} for {origin.grid}, and policy {policy.name} has {here}: "
            "usable, but `calibrate` with these bits finds better ones"
        )


def rounded_otherwise(model: nn.Module, card: RunCard, policy: Policy) -> list[str]:
    """Nodes whose weights a pass rounded for another granularity or format than `policy` has."""
    if card.policy is None or not any(choosing_ranges([one]) for one in card.kept_passes if not one["keeps_function"]):
        return []
    own, asked = (settings_for(model, each) for each in (policy_from_dict(card.policy, card.name), policy))
    nodes = [name for name, node in named_nodes(model).items() if node.role is Role.GEMM_WEIGHT]
    on = [name for name in nodes if own[name].enabled and asked[name].enabled]
    return [name for name in on if _grid(own[name]) != _grid(asked[name])]


def _grid(setting: Setting) -> tuple[str, int | None, str]:
    return setting.granularity, setting.block, setting.format


def _grid_name(bits: int | None, format: str) -> str:
    return "float8" if format == FP8 else f"{bits} bits"


def _origin_text(nodes: dict[str, Origin], origin: Origin) -> str:
    how = "learned" if origin.method == LEARNED else f"found by {origin.method}"
    return f"1 range was {how}" if len(nodes) == 1 else f"{len(nodes)} ranges were {how}"
