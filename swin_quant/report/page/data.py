"""The data of the page, and its charts as Vega-Lite specifications (https://vega.github.io/vega-lite/).

A checkpoint has cards, nodes with their values, pictures that INT8 classifies otherwise; ranges come from the
checkpoint, histograms from the statistics beside it. `assets/charts.json` holds the looks of charts; functions here
fill in values and titles. Colours are viridis and the Okabe-Ito set, which people with any colour vision tell apart;
shapes, labels or the tables repeat what a colour says.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np
from torch import Tensor

from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import find_recorded_file
from swin_quant.cards.records import TriedPolicies
from swin_quant.checkpoint import OpenedCheckpoint, load_calibrated
from swin_quant.config import from_dict
from swin_quant.models import build_model
from swin_quant.models.registry import list_units
from swin_quant.quant.fake_quant import FP8, quantize_dequantize
from swin_quant.quant.layer import weighted_layers
from swin_quant.quant.policy import apply_policy, policy_from_dict
from swin_quant.quant.quantizer import Quantizer, Role, named_nodes
from swin_quant.quant.ranges import Range, get_range
from swin_quant.quant.statistics import Statistics, clipped_share, sqnr_db
from swin_quant.quant.statistics_file import read_statistics
from swin_quant.report.accuracy.rows import dataset_key, dataset_name, is_simulated
from swin_quant.report.verdict import DeployVerdict
from swin_quant.score.scoring import Guess


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

    `cards`: by the part of their paths from the page that tells them apart. `verdicts`: what to deploy, with paths from
    the page. `missing`: why nodes or their values are not shown. The float model and the model under `policy` classify
    `otherwise` of `compared` pictures differently; `disagreements` are the worst of these.
    """

    title: str
    cards: Mapping[str, RunCard]
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
    engines: dict[str, dict[str, str]] = {}  # the type of each node in each artifact, by the policy of its export
    for one in (*artifacts, card):  # the card's own policy is applied last, and stays
        if one.policy:
            apply_policy(model, policy_from_dict(one.policy, one.name))
        if one is not card and one.artifact:
            target = one.artifact["options"].get("target") or one.artifact["backend"]
            engines[f"{target} · {one.policy['name'] if one.policy else 'float'}"] = {
                name: node.setting.kind if one.policy and node.setting.enabled else "float"
                for name, node in nodes.items()
            }
    record = card.calibration.get("statistics") if card.calibration else None
    file = find_recorded_file(record, [checkpoint.file.parent])
    activations = [name for name, node in nodes.items() if node.role is not Role.GEMM_WEIGHT]
    statistics = read_statistics(file, activations) if file else {}
    costs: dict[str, float] = {}
    if card.sensitivity and (overall := card.sensitivity["overall"]["sqnr_db"]) is not None:
        single = (one for one in card.sensitivity["groups"] if one["kind"] == "node")
        without = {one["name"]: one["without"]["sqnr_db"] for one in single}
        costs = {name: sqnr - overall for name, sqnr in without.items() if sqnr is not None}
    units, layers, summaries = list(list_units(model)), weighted_layers(model), []
    for name, node in nodes.items():
        unit = max((one for one in units if name.startswith(f"{one}.")), key=len, default="")
        rest = name.removeprefix(f"{unit}.").removesuffix(_SUFFIX) if unit else name.removesuffix(_SUFFIX)
        known = None if node.amax is None else get_range(node)
        low, high = known.ends_on(node) if known else (None, None)
        grid = "symmetric" if node.setting.symmetric else "zero point"
        weight = layers[name].weight.detach() if name in layers else None
        sqnr, clipped, bins = _measure(node, known, weight, statistics.get(name))
        summaries.append(
            NodeSummary(
                name=name,
                row=unit or name.split(".")[0],
                column=rest.replace("._", ".").replace("_input", ""),
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


def _measure(
    node: Quantizer, known: Range | None, weight: Tensor | None, statistics: Statistics | None
) -> tuple[float | None, float | None, Bins | None]:
    """The SQNR of the node's quantized values in dB, the percentage of values outside the range, and the histogram."""
    if weight is not None:
        bins = _bin_values(weight.numpy().ravel(), float(weight.min()), float(weight.max()), None)
        if known is None:
            return None, None, bins
        amax = node.range_for(weight).detach()
        noise = (quantize_dequantize(weight, amax, *node.setting.levels) - weight).double().square().sum()
        signal = weight.double().square().sum()
        sqnr = 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None
        return sqnr, 100 * (weight.abs() > amax).double().mean().item(), bins
    if statistics is None:
        return None, None, None

    def centres(side: Statistics) -> np.ndarray:
        return np.minimum((np.arange(len(side.counts)) + 0.5) * side.width, side.largest)

    below, above = statistics.sides or (None, statistics)
    values, counts, least = centres(above), above.counts, 0.0
    if below is not None:
        values, counts = np.concatenate([-centres(below), values]), np.concatenate([below.counts, counts])
        least = -below.largest
    bins = _bin_values(values, least, above.largest, counts)
    edge, qmin, qmax = known.get_grid_arguments(node) if known else (0.0, 0, 0)
    if edge <= 0 or (not node.setting.symmetric and statistics.sides is None):
        return None, None, bins
    found = sqnr_db(statistics, edge, qmin, qmax)
    ends = [(statistics, edge)]
    if not node.setting.symmetric:
        ends = list(zip(statistics.both_sides(), (-qmin * edge / qmax, edge), strict=True))
    total = sum(int(side.counts.sum()) for side, _ in ends)
    beyond = sum(clipped_share(side, end) * int(side.counts.sum()) for side, end in ends)
    return (found if math.isfinite(found) else None), 100 * beyond / max(total, 1), bins


def _bin_values(values: np.ndarray, low: float, high: float, counts: np.ndarray | None) -> Bins:
    if not high > low:
        low, high = low - 0.5, high + 0.5
    found, _ = np.histogram(values, BINS, (low, high), weights=counts)
    return Bins(low, high, [int(count) for count in found])


Spec = dict[str, Any]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
# The figures that colour the network: title, field of NodeSummary.
FIGURES = {
    "SQNR of the node's own values, dB": "sqnr_db",
    "cost to the logits, dB": "costs_db",
    "clipped, %": "clipped",
    "amax": "amax",
    "bits": "bits",
}
# The curves of a training: key of an epoch's record, title.
EPOCHS = {
    "train_loss": "training loss",
    "val_loss": "validation loss",
    "acc1": "top-1, %",
    "amax_drift": "mean |change| of amax",
    "clipped_share": "share of values clipped",
}


def asset(name: str) -> str:
    """The text of a file that comes with the page."""
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def make_spec(chart: str, title: str, values: Sequence[Any] = ()) -> Spec:
    """A chart of assets/charts.json with its title and the rows that it shows; the page gives rows to an empty one."""
    data = {"data": {"values": list(values)}} if values else {}
    # The title starts at the chart's own left edge, or a phone cuts it off.
    head = {"title": {"text": title, "anchor": "start", "frame": "bounds", "fontSize": 12}} if title else {}
    looks = json.loads(asset("charts.json"))[chart]
    return {"$schema": SCHEMA, **head, "description": title, "background": None, **data, **looks}


def network(nodes: Sequence[NodeSummary]) -> Spec:
    """Units as rows and their nodes as columns, coloured by a figure that the reader chooses."""
    figures = {title: key for title, key in FIGURES.items() if any(getattr(node, key) is not None for node in nodes)}
    values = [
        {"node": node.name, "unit": node.row, "part": node.column, "state": node.kind if node.on else "float"}
        | {key: getattr(node, key) for key in figures.values()}
        for node in nodes
    ]
    spec = make_spec("network", "The network: every node, coloured by a figure", values)
    spec["params"][0]["value"] = next(iter(figures), "")
    spec["params"][0]["bind"]["options"] = list(figures)
    chosen = " : ".join(f"figure == {title!r} ? datum.{key}" for title, key in figures.items()) + " : null"
    spec["transform"][0]["calculate"] = chosen
    spec["encoding"]["tooltip"] += [
        {"field": key, "type": "quantitative", "title": title, "format": ".4~g"} for title, key in figures.items()
    ]
    return spec


def depth(checkpoint: PageData) -> Spec | None:
    """The SQNR of each block's output, in the order of the blocks."""
    record = next((card.sensitivity for card in checkpoint.cards.values() if card.sensitivity), None)
    if record is None:
        return None
    values = [{"block": name, "dB": sqnr} for name, sqnr in record["profile"].items() if sqnr is not None]
    return make_spec("depth", f"Error through the depth, {record['policy']}, {record['pictures']} pictures", values)


def accuracy_and_latency(checkpoints: Sequence[PageData]) -> Spec | None:
    """Top-1 against milliseconds a picture, on the engines that run a quantized file; a line leads from the engine's
    own float on the same pictures to it. A simulation's latency is no engine's, and another engine's float is no
    baseline of time."""
    cards = (card for checkpoint in checkpoints for card in checkpoint.cards.values())
    measured = [(card, one) for card in cards for one in card.measured()]
    engines = {one.engine for _, one in measured if one.policy and not is_simulated(one.engine)}
    values: list[dict[str, Any]] = [
        {"ms": result.ms_per_picture, "top-1": result.acc1, "engine": result.engine}
        | {"what": " ".join(filter(None, (card.name, result.policy, result.weights, result.precision)))}
        | {"model": card.name, "list": "/".join(dataset_key(result.dataset))}
        | {"pictures": f"{dataset_name(result.dataset)}, {result.pictures} pictures"}
        | {"type": result.precision, "±": result.delta_acc1_se, "Δ top-1": result.delta_acc1}
        for card, result in measured
        if result.ms_per_picture is not None and result.engine in engines
    ]
    if len(values) < 2:
        return None
    spec = make_spec("latency", "Accuracy against latency, as measured", values)
    low, high = min(row["top-1"] for row in values), max(row["top-1"] for row in values)
    middle, half = (low + high) / 2, max(1.0, 0.55 * (high - low))  # or hundredths of a point would look like an abyss
    spec["encoding"]["y"]["scale"]["domain"] = [max(0.0, middle - half), min(100.0, middle + half)]
    if max(row["ms"] for row in values) > 10 * min(row["ms"] for row in values):  # models of several sizes
        spec["encoding"]["x"]["scale"] = {"type": "log"}
        spec["encoding"]["x"]["title"] += ", logarithmic"
    return spec


def searched(record: TriedPolicies) -> Spec:
    """The policies that a search tried: divergence from float against milliseconds, the front as a line.

    Below 1e-5 nats the axis is linear, which gives float32 itself a place on it.
    """
    values = [
        {"policy": one["policy"], "ms": one["ms"], "KL": one["loss"]["kl"], "SQNR": one["loss"]["sqnr_db"]}
        | {"agree": one["loss"]["agreement"], "drop": one["loss"]["drop"], "nodes": one["nodes"]}
        | {"is": "found" if one["found"] else "front" if one["front"] else "beaten", "front": one["front"]}
        for one in record["tried"]
    ]
    title = f"Policies tried for {record['engine']}, batch {record['batch']}, {record['pictures']} pictures"
    return make_spec("search", title, values)


def training(cards: Sequence[RunCard]) -> Spec | None:
    """The curves of trainings, a colour for each run: losses, top-1, and how ranges moved."""
    cards = list({str(card.training): card for card in reversed(cards)}.values())[::-1]  # artifacts repeat trainings
    names = [card.name for card in cards]

    def name_apart(card: RunCard) -> str:
        """The model's name, with file and time behind it where several models have it."""
        if names.count(card.name) == 1 or not card.checkpoint:
            return card.name
        return f"{card.name}, {card.checkpoint['file']}, {card.created}"

    values = [
        {"epoch": epoch["epoch"], "run": run, "what": title, "value": epoch[key]}
        for run, card in {name_apart(card): card for card in cards}.items()
        if card.training
        for key, title in EPOCHS.items()
        for epoch in card.training["epochs"]
        if isinstance(epoch.get(key), (int, float))
    ]
    if not values:
        return None
    runs = list(dict.fromkeys(one["run"] for one in values))
    spec = make_spec("training", f"Training of {runs[0]}" if len(runs) == 1 else "Training", values)
    spec["facet"]["sort"] = list(EPOCHS.values())
    # An axis around a single value has no other to show
    spec["spec"]["encoding"]["y"]["scale"]["zero"] = len({one["epoch"] for one in values}) == 1
    legend = {"orient": "bottom", "columns": 1, "labelLimit": 500} if len(runs) > 1 else None
    spec["spec"]["encoding"]["color"]["legend"] = legend
    return spec
