"""The charts of the page, as Vega-Lite specifications (https://vega.github.io/vega-lite/).

`assets/charts.json` holds their looks; the functions here fill in values and titles. Colours are viridis and the
Okabe-Ito set, which people with any colour vision tell apart; shapes, labels or the tables repeat what a colour says.
"""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from swin_quant.cards.card import RunCard
from swin_quant.cards.costs import TriedPolicies
from swin_quant.report.accuracy.footnotes import is_simulated
from swin_quant.report.page.data import NodeSummary, PageData

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
    record = next((card.sensitivity for card in checkpoint.cards if card.sensitivity), None)
    if record is None:
        return None
    values = [{"block": name, "dB": sqnr} for name, sqnr in record["profile"].items() if sqnr is not None]
    return make_spec("depth", f"Error through the depth, {record['policy']}, {record['pictures']} pictures", values)


def accuracy_and_latency(checkpoints: Sequence[PageData]) -> Spec | None:
    """Top-1 against milliseconds a picture, on the engines that run a quantized file; a line leads from the engine's
    own float to it. A simulation's latency is no engine's, and another engine's float is no baseline of time."""
    measured = [(card, one) for checkpoint in checkpoints for card in checkpoint.cards for one in card.measured()]
    engines = {one.engine for _, one in measured if one.policy and not is_simulated(one.engine)}
    values: list[dict[str, Any]] = [
        {
            "ms": result.ms_per_picture,
            "top-1": result.acc1,
            "engine": result.engine,
            "what": " ".join(filter(None, (card.name, result.policy, result.weights, result.precision))),
            "type": result.precision,
            "±": result.delta_acc1_se,
            "Δ top-1": result.delta_acc1,
        }
        for card, result in measured
        if result.ms_per_picture is not None and result.engine in engines
    ]
    if len(values) < 2:
        return None
    spec = make_spec("latency", "Accuracy against latency, as measured", values)
    low, high = min(row["top-1"] for row in values), max(row["top-1"] for row in values)
    middle, half = (low + high) / 2, max(1.0, 0.55 * (high - low))  # or hundredths of a point would look like an abyss
    spec["encoding"]["y"]["scale"]["domain"] = [middle - half, middle + half]
    return spec


def searched(record: TriedPolicies) -> Spec:
    """The policies that a search tried: divergence from float against milliseconds, the front as a line.

    Below 1e-5 nats the axis is linear, which gives float32 itself a place on it.
    """
    values = [
        {
            "policy": one["policy"],
            "ms": one["ms"],
            "KL": one["loss"]["kl"],
            "SQNR": one["loss"]["sqnr_db"],
            "agree": one["loss"]["agreement"],
            "drop": one["loss"]["drop"],
            "nodes": one["nodes"],
            "is": "found" if one["found"] else "front" if one["front"] else "beaten",
            "front": one["front"],
        }
        for one in record["tried"]
    ]
    title = f"Policies tried for {record['engine']}, batch {record['batch']}, {record['pictures']} pictures"
    return make_spec("search", title, values)


def training(cards: Sequence[RunCard]) -> Spec | None:
    """The curves of trainings, a colour for each run: losses, top-1, and how ranges moved."""
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
    legend = {"orient": "bottom", "columns": 1, "labelLimit": 500} if len(runs) > 1 else None
    spec["spec"]["encoding"]["color"]["legend"] = legend
    return spec
