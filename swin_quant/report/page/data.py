"""The data of the page: a checkpoint's cards, its nodes with their values, pictures that INT8 classifies otherwise.

Ranges come from the checkpoint, histograms from the statistics beside it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor, nn

from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import find_recorded_file
from swin_quant.checkpoint import OpenedCheckpoint, load_calibrated
from swin_quant.config import from_dict
from swin_quant.models import build_model
from swin_quant.models.registry import list_units
from swin_quant.quant.advice import clipped_share
from swin_quant.quant.fake_quant import FP8, quantize_dequantize
from swin_quant.quant.layer import weighted_layers
from swin_quant.quant.policy import apply_policy, policy_from_dict
from swin_quant.quant.quantizer import Quantizer, Role, named_nodes
from swin_quant.quant.ranges import Range, get_range
from swin_quant.quant.statistics import Statistics, sqnr_db
from swin_quant.quant.statistics_file import read_statistics
from swin_quant.report.verdict import DeployVerdict
from swin_quant.score.metrics import Guess


@dataclass(frozen=True)
class Bins:
    """How often a node's values lie in equal bins from `low` to `high`."""

    low: float
    high: float
    counts: Sequence[int]


@dataclass(frozen=True)
class NodeSummary:
    """One quantizer node; an unknown figure is None.

    `row`, `column`: its place in the picture of the network. `kind`: the type of its values when it is on, `int8` or
    `fp8`. `low`, `high`: the range in effect; for a weight with a range per row, the widest. `clipped`: percent of its
    values outside the range. `sqnr_db`: SQNR of its quantized values. `costs_db`: the rise of the logits' SQNR without
    it. `engines`: its type in each artifact.
    """

    name: str
    row: str
    column: str
    role: str
    on: bool
    kind: str
    bits: int
    grid: str
    amax: float | None
    low: float | None
    high: float | None
    clipped: float | None
    sqnr_db: float | None
    costs_db: float | None
    engines: Mapping[str, str] = field(default_factory=dict)
    bins: Bins | None = None


@dataclass(frozen=True)
class Disagreement:
    """A picture that the float and the quantized model classify differently, with the classes that each finds most
    probable, best first; `thumbnail` is a JPEG in base64."""

    picture: str
    label: str
    thumbnail: str
    float_sees: Sequence[Guess]
    quantized_sees: Sequence[Guess]
    kl: float


@dataclass(frozen=True)
class PageData:
    """A checkpoint: its cards, and the nodes that its file and the statistics beside it describe.

    `verdicts`: what to deploy, with paths from the page. `missing`: why nodes or their values are not shown. The float
    model and the model under `policy` classify `otherwise` of `compared` pictures differently; `disagreements` are the
    worst of these.
    """

    title: str
    cards: Sequence[RunCard]
    nodes: Sequence[NodeSummary] = ()
    missing: str = ""
    compared: int = 0
    otherwise: int = 0
    policy: str = ""
    disagreements: Sequence[Disagreement] = ()
    verdicts: Sequence[DeployVerdict] = ()


BINS = 48
_SUFFIX = "_quantizer"


def node_summaries(card: RunCard, checkpoint: OpenedCheckpoint, artifacts: Sequence[RunCard] = ()) -> list[NodeSummary]:
    """Every node of the `checkpoint` under the policy of its `card`. `artifacts`: cards of files made from it."""
    model = build_model(from_dict(card.config, card.name))
    load_calibrated(model, checkpoint)
    nodes = named_nodes(model)
    engines = {}
    for one in artifacts:
        assert one.artifact is not None
        target = one.artifact["options"].get("target") or one.artifact["backend"]
        engines[f"{target} · {one.policy['name'] if one.policy else 'float'}"] = _precisions(model, one)
    _apply(model, card)
    record = card.calibration.get("statistics") if card.calibration else None
    file = find_recorded_file(record, [checkpoint.file.parent])
    activations = [name for name, node in nodes.items() if node.role is not Role.GEMM_WEIGHT]
    statistics = read_statistics(file, activations) if file else {}
    costs: dict[str, float] = {}
    if card.sensitivity and (overall := card.sensitivity["overall"]["sqnr_db"]) is not None:
        single = (one for one in card.sensitivity["groups"] if one["kind"] == "node")
        without = {one["name"]: one["without"]["sqnr_db"] for one in single}
        costs = {name: sqnr - overall for name, sqnr in without.items() if sqnr is not None}
    units = list(list_units(model))
    layers = weighted_layers(model)
    summaries = []
    for name, node in nodes.items():
        row, column = _place(name, units)
        found = statistics.get(name)
        weight = layers[name].weight.detach() if name in layers else None
        known = None if node.amax is None else get_range(node)
        bins = _make_bins(found) if found else None
        sqnr, clipped = None, None
        if weight is not None:
            bins = _binned(weight.numpy().ravel(), float(weight.min()), float(weight.max()), None)
        if known is not None and weight is not None:
            sqnr, clipped = _measure_weight(weight, node)
        elif known is not None and found is not None:
            sqnr, clipped = _quality(found, known, node)
        low, high = known.ends_on(node) if known else (None, None)
        grid = "symmetric" if node.setting.symmetric else "zero point"
        summaries.append(
            NodeSummary(
                name=name,
                row=row,
                column=column,
                role=node.role.value,
                on=node.setting.enabled,
                kind=node.setting.kind,
                bits=node.setting.bits,
                grid="E4M3" if node.setting.format == FP8 else grid,
                amax=known.amax if known else None,
                low=low,
                high=high,
                clipped=clipped,
                sqnr_db=sqnr,
                costs_db=costs.get(name),
                engines={title: each[name] for title, each in engines.items()},
                bins=bins,
            )
        )
    return summaries


def _apply(model: nn.Module, card: RunCard) -> None:
    if card.policy:
        apply_policy(model, policy_from_dict(card.policy, card.name))


def _precisions(model: nn.Module, card: RunCard) -> dict[str, str]:
    """The type of each node in an artifact, by the policy of its export."""
    _apply(model, card)
    on = bool(card.policy)
    return {
        name: node.setting.kind if on and node.setting.enabled else "float" for name, node in named_nodes(model).items()
    }


def _place(name: str, units: Sequence[str]) -> tuple[str, str]:
    """(the unit of a node, the rest of its name): row and column in the picture of the network."""
    unit = max((one for one in units if name.startswith(f"{one}.")), key=len, default="")
    rest = name.removeprefix(f"{unit}.").removesuffix(_SUFFIX) if unit else name.removesuffix(_SUFFIX)
    return unit or name.split(".")[0], rest.replace("._", ".").replace("_input", "")


def _quality(statistics: Statistics, known: Range, node: Quantizer) -> tuple[float | None, float | None]:
    """The SQNR of the node's quantized values in dB, and the percentage of values outside the range."""
    amax, qmin, qmax = known.get_grid_arguments(node)
    if amax <= 0:
        return None, None
    if not node.setting.symmetric and statistics.sides is None:
        return None, None
    sqnr = sqnr_db(statistics, amax, qmin, qmax)
    sides = [(statistics, amax)]
    if not node.setting.symmetric:
        sides = list(zip(statistics.both_sides(), (-qmin * amax / qmax, amax), strict=True))
    total = sum(int(side.counts.sum()) for side, _ in sides)
    beyond = sum(clipped_share(side, end) * int(side.counts.sum()) for side, end in sides)
    return (sqnr if math.isfinite(sqnr) else None), 100 * beyond / max(total, 1)


def _measure_weight(weight: Tensor, node: Quantizer) -> tuple[float | None, float]:
    amax = node.range_for(weight).detach()
    noise = (quantize_dequantize(weight, amax, *node.setting.levels) - weight).double().square().sum()
    signal = weight.double().square().sum()
    sqnr = 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None
    return sqnr, 100 * (weight.abs() > amax).double().mean().item()


def _make_bins(statistics: Statistics) -> Bins:
    below, above = statistics.sides or (None, statistics)
    values, counts = _centres(above), above.counts
    if below is not None:
        values, counts = np.concatenate([-_centres(below), values]), np.concatenate([below.counts, counts])
    low, high = -below.largest if below is not None else 0.0, above.largest
    return _binned(values, low, high, counts)


def _centres(side: Statistics) -> np.ndarray:
    return np.minimum((np.arange(len(side.counts)) + 0.5) * side.width, side.largest)


def _binned(values: np.ndarray, low: float, high: float, counts: np.ndarray | None) -> Bins:
    if not high > low:
        low, high = low - 0.5, high + 0.5
    found, _ = np.histogram(values, BINS, (low, high), weights=counts)
    return Bins(low, high, [int(count) for count in found])
