"""The baseline of a checkpoint, as loaded models and as engines.

A checkpoint that was only calibrated is its own baseline, with its nodes off. A checkpoint that was trained with nodes
on (QAT), or whose weights a pass corrected, is compared with its original float model. Its own weights without
quantization and, beside QAT, the calibrated model (PTQ) are also scored, but are never the baseline.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from yacs.config import CfgNode

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import find_original, find_qat_start, find_recorded_file
from swin_quant.cards.records import ORIGINAL, PTQ, QAT, UNQUANTIZED
from swin_quant.checkpoint import Source, load_calibrated, load_float
from swin_quant.checkpoint.ranges import check_bits, origins
from swin_quant.models import build_model
from swin_quant.models.classifier import Classifier
from swin_quant.quant.calibration import Calibration, Method, search_ranges
from swin_quant.quant.passes import choosing_ranges
from swin_quant.quant.policy import Policy, apply_policy
from swin_quant.quant.quantizer import Role, named_nodes
from swin_quant.quant.statistics_file import read_statistics
from swin_quant.score.engine import Engine, torch_engines


@dataclass(frozen=True)
class Baseline:
    """The models beside a checkpoint whose weights are not the original's; None for a model that is not found.

    `original`: the float model. `ptq`: for QAT, the calibrated model at its start; `ptq_calibrator`: the methods that
    found its ranges, if they were searched again. `whose`: the name of its own weights, qat or ptq; None: they are the
    original's, a module as the user gave it.
    """

    original: nn.Module | None = None
    ptq: nn.Module | None = None
    whose: str | None = QAT
    ptq_calibrator: str | None = None


def unnamed_baseline(card: RunCard) -> Baseline | None:
    """A baseline without models, which keeps a model with its own weights from being called the original."""
    return Baseline(whose=whose_weights(card) or QAT) if card.has_own_weights else None


def whose_weights(card: RunCard) -> str | None:
    """The name of a card's weights in results, qat or ptq; None for the original's."""
    return QAT if card.is_qat else PTQ if card.has_own_weights else None


def find_baseline(
    card: RunCard,
    folders: Sequence[Path],
    cfg: CfgNode,
    policies: Sequence[Policy] = (),
    world: World = World(),
    float_file: str | None = None,
) -> Baseline | None:
    """The baseline of the checkpoint of `card`; None if its weights are the original's, which it is compared with.

    `float_file` names the original; without it, `folders` and the card's path are searched, and a warning says where
    it is missing. SwinQuantError if `float_file` is another file than the card's, or has another architecture.
    """
    file = find_original(card, folders, float_file) if float_file or card.has_own_weights else None
    whose = whose_weights(card)
    if whose is None:
        return None
    if file is None:
        log.warning("%s", missing(card))
    original = load_original(cfg, file, world)[0] if file else None
    ptq, calibrator = _load_ptq(card, folders, cfg, policies, world) if card.is_qat else (None, None)
    return Baseline(original, ptq, whose, calibrator)


def load_original(cfg: CfgNode, file: str | Path, world: World) -> tuple[Classifier, Source]:
    """The float model in `file`, without ranges. SwinQuantError for another architecture or number of classes."""
    model = _built(cfg)
    source = load_float(model, file, replace_head=None)
    return model.to(world.device), source


def missing(card: RunCard) -> str:
    """Why there is no delta, and the remedy."""
    kind = "QAT" if card.is_qat else "calibration with passes"
    if card.source is None:
        return f"no delta: the run card names no float checkpoint that this {kind} began with"
    return (
        f"no delta: the original float model of this {kind} is not found: give {card.source['file']} (SHA-256 "
        f"{card.source['sha256'][:12]}...) as ‹float› FILE"
    )


def _load_ptq(
    card: RunCard, folders: Sequence[Path], cfg: CfgNode, policies: Sequence[Policy], world: World
) -> tuple[Classifier | None, str | None]:
    """The model that QAT started from, and the methods that found ranges again, for nodes whose bits have changed."""
    if not policies:
        return None, None
    start = find_qat_start(card, folders)
    if start is None:
        log.info("PTQ is not scored beside QAT: the checkpoint that QAT started from is not found")
        return None, None
    model = _built(cfg)
    apply_policy(model, policies[0])
    nodes, methods = named_nodes(model), None
    try:
        load_calibrated(model, start.file)
        record = start.card.calibration if start.card else None
        wrong: list[str] = []
        if start.card and record and not choosing_ranges(record.get("passes", [])):
            made = origins(model, start.card)
            on = {name: node.setting for name, node in nodes.items() if node.setting.enabled}
            wrong = [name for name, setting in on.items() if made[name].bits not in (None, setting.bits)]
        if record and wrong and (file := find_recorded_file(record.get("statistics"), [start.file.parent])):
            names = [name for name, node in nodes.items() if node.role is not Role.GEMM_WEIGHT]
            counted, method = read_statistics(file, names), Method()
            sides = {name: each.both_sides() for name, each in counted.items()}
            largest = {name: each.largest for name, each in counted.items()}
            ends = {name: (-below.largest, above.largest) for name, (below, above) in sides.items()}
            calibration = Calibration(record["pictures"], counted, largest, ends=ends)
            for name, found in search_ranges(model, calibration, method, wrong).items():
                found.give(nodes[name], next(model.parameters()).device)
            log.info("PTQ beside QAT: %d of its ranges are found again, for the bits in use, in %s", len(wrong), file)
            methods = "+".join(sorted({method.for_bits(nodes[name].setting.bits) for name in wrong}))
        else:
            check_bits(model, start.card, policies, str(start.file))
    except SwinQuantError as error:
        log.info("PTQ is not scored beside QAT: %s", error)
        return None, None
    return model.to(world.device), methods


def _built(cfg: CfgNode) -> Classifier:
    with torch.random.fork_rng():  # its weights are about to be replaced
        return build_model(cfg)


def engines_beside(
    model: nn.Module, device: torch.device, half: str | None, policies: Sequence[Policy], baseline: Baseline | None
) -> dict[str, Engine]:
    """Engines by label: float32 and `half` of the original, PTQ, then `model` under each policy and unquantized.

    Without a baseline they are `torch_engines` of the model. Without an original none is called float32.
    """
    if baseline is None:
        return torch_engines(model, device, half, policies)
    engines = load_original_engines(baseline, device, half)
    if baseline.ptq:
        found_by = baseline.ptq_calibrator
        ptq = {key: one for key, one in torch_engines(baseline.ptq, device, None, policies).items() if one.policy}
        engines |= {f"PTQ {key}": replace(one, weights=PTQ, calibrator=found_by) for key, one in ptq.items()}
    (_, unquantized), *quantized = torch_engines(model, device, None, policies).items()
    if baseline.whose is None:
        return engines | dict(quantized)
    found = [*quantized, (UNQUANTIZED[baseline.whose], unquantized)]
    return engines | {key: replace(engine, weights=baseline.whose) for key, engine in found}


def load_original_engines(baseline: Baseline, device: torch.device, half: str | None) -> dict[str, Engine]:
    """float32 and `half` of the original, by label; no engine if it was not found."""
    engines = torch_engines(baseline.original, device, half) if baseline.original else {}
    weights = ORIGINAL if baseline.whose else None
    return {key: replace(engine, weights=weights) for key, engine in engines.items()}
