"""For which bits the ranges of a checkpoint were found, as its run card says, and whether a policy may use them.

A range of `mse` or `entropy`, or one that was learned, is the best for one number of bits and clips wrongly at another.
`percentile` and `max`, and the maxima that weights have, are the same at any.
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
from swin_quant.quant.passes import choosing_ranges, passes
from swin_quant.quant.policy import Policy, Setting, policy_from_dict, settings_for
from swin_quant.quant.quantizer import Role, named_nodes
from swin_quant.quant.range_methods import RANGE_METHODS

LEARNED = "learned"
OF_BITS = (
    *(name for name, method in RANGE_METHODS.items() if method.of_bits),
    LEARNED,
    *(name for name, one in passes().items() if one.of_ranges),
)
"""Ways to find a range whose result depends on the bits."""


@dataclass(frozen=True)
class Origin:
    """How the range of a node was found, and for how many bits; None: for any."""

    method: str
    bits: int | None = None


def bits_record(model: nn.Module, method: Method) -> BitsRecord:
    """What a calibration record says of the bits of `model`'s activation nodes, its policy applied."""
    bits = {name: node.bits for name, node in named_nodes(model).items() if node.role is not Role.GEMM_WEIGHT}
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
    """Node -> how its range was found, for the model of a calibrated checkpoint and its card.

    Cards of before bits were recorded are of ranges for the bits of their policy.
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
            found[name] = Origin(Method().for_bits(setting.bits), setting.bits)  # QAT calibrates anew what it left out
        elif trained and setting and (method := trained[kind]):
            found[name] = Origin(method, setting.bits)
        elif fitted and setting and setting.enabled:
            found[name] = Origin(fitted[-1], setting.bits)
        elif kind == "weights" or card.calibration is None:
            found[name] = Origin("max")
        else:
            found[name] = _calibrated(card.calibration, name, setting.bits if setting else None)
    return found


def _calibrated(record: CalibrationRecord, name: str, bits: int | None) -> Origin:
    bits = record.get("other_bits", {}).get(name, record.get("bits", bits))
    of_bits = record.get("methods", {}).get(str(bits), record["method"])
    return Origin(record.get("node_methods", {}).get(name, of_bits), bits)


def check_bits(model: nn.Module, card: RunCard | None, policies: Sequence[Policy], checkpoint: str) -> None:
    """UsageError where a policy gives a node other bits than its range was found for, and the range depends on them.

    A warning where it does not; where no card says for which bits ranges were found, unless 8 are asked for; and where
    a pass rounded weights for ranges of another granularity.
    """
    found = origins(model, card) if card and card.calibration else None
    for policy in policies:
        bits = {name: setting.bits for name, setting in settings_for(model, policy).items() if setting.enabled}
        if found is None:
            if other := sorted(set(bits.values()) - {8}):
                log.warning(
                    "%s: no run card says for how many bits its ranges were found: policy %s has %s",
                    checkpoint, policy.name, listed(map(str, other)),
                )  # fmt: skip
            continue
        if card and (names := rounded_otherwise(model, card, policy)):
            log.warning(
                "%s: %s rounded weights for other granularities than policy %s has (%s): they are rounded once more, "
                "and `calibrate` under it finds better ones",
                checkpoint, choosing_ranges(card.kept_passes)[-1], policy.name, listed(names, 2),
            )  # fmt: skip
        others = {name: found[name] for name in bits if found[name].bits not in (None, bits[name])}
        wrong = {name: origin for name, origin in others.items() if origin.method in OF_BITS}
        if not others:
            continue
        name, origin = next(iter((wrong or others).items()))
        if wrong:
            remedy = "finetune" if origin.method == LEARNED else "calibrate the float checkpoint"
            if origin.method in RANGE_METHODS:
                remedy = "calibrate (from ‹statistics›, without pictures)"
            raise UsageError(
                f"{checkpoint}: {_found(wrong, origin)} for {origin.bits} bits, and policy {policy.name} "
                f"has {bits[name]} at {name}: {remedy} with these bits"
            )
        log.warning(
            "%s: %s for %d bits, and policy %s has %d: usable, but `calibrate` with these bits finds better ones",
            checkpoint, _found(others, origin), origin.bits, policy.name, bits[name],
        )  # fmt: skip


def rounded_otherwise(model: nn.Module, card: RunCard, policy: Policy) -> list[str]:
    """Nodes whose weights a pass put on the grid of ranges per tensor, or row, where `policy` has ranges of others."""
    if card.policy is None or not any(choosing_ranges([one]) for one in card.kept_passes if not one["keeps_function"]):
        return []
    own, asked = (settings_for(model, each) for each in (policy_from_dict(card.policy, card.name), policy))
    nodes = [name for name, node in named_nodes(model).items() if node.role is Role.GEMM_WEIGHT]
    on = [name for name in nodes if own[name].enabled and asked[name].enabled]
    return [name for name in on if _grid(own[name]) != _grid(asked[name])]


def _grid(setting: Setting) -> tuple[str, int | None]:
    return setting.granularity, setting.block


def _found(nodes: dict[str, Origin], origin: Origin) -> str:
    how = "learned" if origin.method == LEARNED else f"found by {origin.method}"
    return f"1 range was {how}" if len(nodes) == 1 else f"{len(nodes)} ranges were {how}"
