"""The charts of runs: how trainings went, and what a search for a policy tried."""

from collections.abc import Sequence

from swin_quant.cards.card import RunCard
from swin_quant.cards.costs import TriedPolicies
from swin_quant.report.page.spec import OKABE_ITO, Spec, spec

_SMALL_KL = 1e-5  # nats; below, the axis is linear, so that float32 itself has a place
_TRIED = {"found": OKABE_ITO[1], "front": OKABE_ITO[0], "beaten": OKABE_ITO[6]}
_EPOCHS = {
    "train_loss": "training loss",
    "val_loss": "validation loss",
    "acc1": "top-1, %",
    "amax_drift": "mean |change| of amax",
    "clipped_share": "share of values clipped",
}


def searched(record: TriedPolicies) -> Spec:
    """The policies that a search tried: divergence from float against milliseconds, the front as a line."""
    values = [
        {"policy": one["policy"], "ms": one["ms"], "KL": one["loss"]["kl"], "SQNR": one["loss"]["sqnr_db"],
         "agree": one["loss"]["agreement"], "drop": one["loss"]["drop"], "nodes": one["nodes"],
         "is": "found" if one["found"] else "front" if one["front"] else "beaten", "front": one["front"]}
        for one in record["tried"]
    ]  # fmt: skip
    x = {"field": "ms", "type": "quantitative", "title": "ms", "scale": {"zero": False}}
    y = {"field": "KL", "type": "quantitative", "title": "KL from float32, nats", "scale": {"type": "symlog",
         "constant": _SMALL_KL}, "axis": {"format": "~e"}}  # fmt: skip
    figures = {"nodes": "nodes on", "ms": "ms", "KL": "KL", "SQNR": "SQNR dB", "agree": "agree %",
               "drop": "expected drop"}  # fmt: skip
    tooltip = [{"field": key, "type": "quantitative", "format": ".4~g", "title": title}
               for key, title in figures.items()]  # fmt: skip
    title = f"Policies tried for {record['engine']}, batch {record['batch']}, {record['pictures']} pictures"
    return {
        **spec(title, values),
        "width": "container",
        "height": 260,
        "layer": [
            {
                "transform": [{"filter": "datum.front"}],
                "mark": {"type": "line", "interpolate": "step-after", "color": OKABE_ITO[6], "strokeDash": [4, 3]},
                "encoding": {"x": x, "y": y},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 90},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": {"field": "is", "type": "nominal", "title": None,
                              "scale": {"domain": list(_TRIED), "range": list(_TRIED.values())}},
                    "shape": {"field": "is", "type": "nominal", "title": None, "scale": {"domain": list(_TRIED)}},
                    "tooltip": [{"field": "policy"}, *tooltip],
                },
            },
        ],
    }  # fmt: skip


def training(cards: Sequence[RunCard]) -> Spec | None:
    """Curves of trainings, a colour each: losses, top-1, and how ranges moved."""
    values = [
        {"epoch": epoch["epoch"], "run": run, "what": title, "value": epoch[key]}
        for run, card in _told_apart(cards).items()
        if card.training
        for key, title in _EPOCHS.items()
        for epoch in card.training["epochs"]
        if isinstance(epoch.get(key), (int, float))
    ]
    if not values:
        return None
    runs = list(dict.fromkeys(one["run"] for one in values))
    return {
        **spec(f"Training of {runs[0]}" if len(runs) == 1 else "Training", values),
        "facet": {"field": "what", "type": "nominal", "sort": list(_EPOCHS.values()), "title": None},
        "columns": 3,
        "spec": {
            "width": 240,
            "height": 160,
            "mark": {"type": "line", "point": True},
            "encoding": {
                "color": {"field": "run", "type": "nominal", "title": None, "scale": {"range": OKABE_ITO},
                          "legend": {"orient": "bottom", "columns": 1, "labelLimit": 500} if len(runs) > 1 else None},
                "strokeDash": {"field": "run", "type": "nominal"},
                "x": {"field": "epoch", "type": "quantitative", "axis": {"tickMinStep": 1, "format": "d"}},
                "y": {"field": "value", "type": "quantitative", "title": None, "scale": {"zero": False}},
                "tooltip": [{"field": "run"}, {"field": "epoch"},
                            {"field": "value", "type": "quantitative", "format": ".5~g"}],
            },
        },
        "resolve": {"scale": {"y": "independent"}},
    }  # fmt: skip


def _told_apart(cards: Sequence[RunCard]) -> dict[str, RunCard]:
    """By names that differ: that of the model, with its file where several have one name."""
    names = [card.name for card in cards]
    return {
        card.name if names.count(card.name) == 1 or not card.checkpoint
        else f"{card.name}, {card.checkpoint['file']}, {card.created}": card
        for card in cards
    }  # fmt: skip
