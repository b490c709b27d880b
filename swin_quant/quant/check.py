"""The cost of calibrated ranges: compare the quantized model with the float one on some calibration pictures.

A method that clips away the signal ruins a model without an error. So the logits are compared once, in a few forward
passes. Only if they are far apart, other methods are tried on the same statistics, and the nodes at fault are found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from swin_quant.config.outputs import LOGITS
from swin_quant.quant.calibration import Calibration, Method, observe, search_ranges
from swin_quant.quant.distance import decibels, noise
from swin_quant.quant.outputs import rows
from swin_quant.quant.policy import enabled_nodes, quantizing
from swin_quant.quant.quantizer import Role
from swin_quant.quant.ranges import Range, get_range, keeping_ranges, methods_for
from swin_quant.quant.watch import eval_mode

PICTURES = 32  # their SQNR is within 1 dB of the value on ten times as many
# Chosen on training pictures of four micro models, more and less trained, at 8 to 4 bits: from 20 dB on, 1,000 pictures
# showed at most one point of accuracy lost; at 17 dB one to two, at 10 dB five. Methods with equal accuracy differ by
# less than 1.5 dB. 6 dB less of a node's own SQNR is twice the error.
LOSS_DB, RUIN_DB, BETTER_DB, FAULT_DB = 20.0, 10.0, 1.5, 6.0
Shown = tuple[Tensor, Tensor]  # images [B, 3, H, W], and the float logits [B, classes] or other `rows` for them


@dataclass(frozen=True)
class Check:
    """Top-1 agreement in percent and SQNR of the logits in dB (infinite if equal), quantized against float.

    `others`: the SQNR with the ranges of other methods, if they were tried. `at_fault`: nodes, worst first, that
    recover most of the loss with the best other method's ranges. `of`: the kind of output; agreement is for logits.
    """

    pictures: int
    agreement: float
    sqnr_db: float
    others: Mapping[str, float] = field(default_factory=dict)
    at_fault: Sequence[str] = ()
    of: str = LOGITS

    @property
    def better(self) -> str | None:
        """The best of the other methods, if it is clearly better."""
        best = max(self.others, key=self.others.__getitem__, default=None)
        return best if best and self.others[best] > self.sqnr_db + BETTER_DB else None


def check_ranges(model: nn.Module, calibration: Calibration, method: Method, batches: Sequence[Shown]) -> Check | None:
    """Compare `model`, calibrated by `method` and under its policy, with itself in float; its ranges stay.

    `batches`: some of the calibration pictures. None if the policy quantizes nothing, or there is no picture.
    """
    pictures = sum(len(images) for images, _ in batches)
    if not enabled_nodes(model) or not pictures:
        return None
    nodes = {name: node for name, node in enabled_nodes(model).items() if node.role is not Role.GEMM_WEIGHT}

    def compared() -> tuple[float, float]:
        with quantizing(model), torch.inference_mode(), eval_mode(model):
            return agreement_and_sqnr([(rows(model(images)), logits) for images, logits in batches])

    agreement, sqnr = compared()
    check = Check(pictures, agreement, sqnr, of=getattr(model, "output_kind", LOGITS))
    if sqnr >= LOSS_DB or not nodes:
        return check
    if len(calibration.statistics) < len(calibration.largest):  # `max` keeps no histograms
        calibration = observe(model, [images for images, _ in batches], replace(method, name="mse"))

    def sqnr_with(ranges: Mapping[str, Range]) -> float:
        with keeping_ranges(nodes.values()):
            for name, found in ranges.items():
                found.give(nodes[name])
            return compared()[1]

    ranges: dict[str, dict[str, Range]] = {}
    others: dict[str, float] = {}
    for name in methods_for(enabled_nodes(model).values()):
        if any(method.for_bits(node.setting.bits) != name for node in nodes.values()):
            ranges[name] = search_ranges(model, calibration, replace(method, name=name), nodes)
            others[name] = sqnr_with(ranges[name])
    check = replace(check, others=others)
    if check.better:
        gains: dict[str, float] = {}
        for name, node in nodes.items():
            found, counted = ranges[check.better][name], calibration.statistics[name]
            if not found.is_dead:
                gains[name] = found.sqnr_db(counted, node) - get_range(node).sqnr_db(counted, node)
        suspects = sorted((name for name in gains if gains[name] >= FAULT_DB), key=gains.__getitem__, reverse=True)
        mended = sqnr_with({name: ranges[check.better][name] for name in suspects}) if suspects else sqnr
        if mended - sqnr >= (others[check.better] - sqnr) / 2:
            check = replace(check, at_fault=suspects)
    return check


def compare(model: nn.Module, batches: Sequence[Tensor], expected: Tensor) -> tuple[float, float]:
    """Top-1 agreement in percent and SQNR in dB of the quantized model's logits against `expected`."""
    with quantizing(model):
        return agreement_and_sqnr([(compute_logits(model, batches), expected)])


@torch.inference_mode()
def compute_logits(model: nn.Module, batches: Sequence[Tensor]) -> Tensor:
    """Logits or other `rows` of the model in its present state, float32 [N, classes], for batches [B, 3, H, W]."""
    return torch.cat([rows(model(batch)) for batch in batches]).float()


def agreement_and_sqnr(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Top-1 agreement in percent and SQNR in dB of logits [N, classes] against the expected ones, in pairs."""
    agree = sum(int((logits.argmax(1) == expected.argmax(1)).sum()) for logits, expected in pairs)
    sums = [noise(logits.double(), expected.double()) for logits, expected in pairs]
    share = 100 * agree / sum(len(logits) for logits, _ in pairs)
    return share, decibels(*(sum(column) for column in zip(*sums, strict=True)))
