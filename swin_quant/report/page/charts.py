"""The charts of a checkpoint: its nodes, its depth, its accuracy beside its latency."""

from collections.abc import Sequence

from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result
from swin_quant.report.accuracy.footnotes import is_simulated
from swin_quant.report.page.data import NodeSummary, PageData
from swin_quant.report.page.spec import OKABE_ITO, Spec, spec

# What the picture of the network can be coloured by: field, title, what is drawn dark.
FIGURES = {
    "SQNR of the node's own values, dB": "sqnr_db",
    "what it costs the logits, dB": "costs_db",
    "clipped, %": "clipped",
    "amax": "amax",
    "bits": "bits",
}


def network(nodes: Sequence[NodeSummary]) -> Spec:
    """Units as rows, their nodes as columns, coloured by a figure that the reader chooses."""
    figures = {title: key for title, key in FIGURES.items() if any(getattr(node, key) is not None for node in nodes)}
    values = [
        {"node": n.name, "unit": n.row, "part": n.column, "state": n.kind if n.on else "float", **{
            key: getattr(n, key) for key in figures.values()}}
        for n in nodes
    ]  # fmt: skip
    chosen = " : ".join(f"figure == {title!r} ? datum.{key}" for title, key in figures.items()) + " : null"
    return {
        **spec("The network: every node, coloured by a figure", values),
        "params": [
            {"name": "figure", "value": next(iter(figures), ""), "bind": {
                "input": "select", "options": list(figures), "name": "colour by "}},
        ],
        "transform": [{"calculate": chosen, "as": "chosen"}],
        "mark": {"type": "rect", "cursor": "pointer", "strokeWidth": 1},
        "width": {"step": 26},
        "height": {"step": 18},
        "encoding": {
            "x": {"field": "part", "type": "nominal", "sort": None, "title": None,
                  "axis": {"labelAngle": -50, "orient": "top", "labelLimit": 160}},
            "y": {"field": "unit", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 160}},
            "color": {
                "condition": {"test": "isValid(datum.chosen)", "field": "chosen", "type": "quantitative",
                              "scale": {"scheme": "viridis"}, "legend": {"title": None}},
                "value": "#8884",
            },
            "opacity": {"condition": {"test": "datum.state == 'float'", "value": 0.3}, "value": 1},
            "tooltip": [{"field": key, "type": "nominal"} for key in ("node", "state")]
            + [{"field": key, "type": "quantitative", "title": title, "format": ".4~g"}
               for title, key in figures.items()],
        },
    }  # fmt: skip


def values_of_a_node() -> Spec:
    """The template of a histogram; the page gives it `bins` of {low, high, count} and `ends` of {at, what}."""
    return {
        **spec("", []),
        "width": "container",
        "height": 200,
        "layer": [
            {
                "data": {"name": "bins"},
                "mark": {"type": "bar", "binSpacing": 0, "color": OKABE_ITO[0], "clip": True},
                "encoding": {
                    "x": {"field": "low", "type": "quantitative", "title": "value"},
                    "x2": {"field": "high"},
                    "y": {"field": "count", "type": "quantitative", "title": "how often",
                          "scale": {"type": "symlog"}, "axis": {"format": "~s", "tickCount": 5}},
                    "y2": {"datum": 0},
                    "tooltip": [{"field": each, "type": "quantitative", "format": ".4~g"}
                                for each in ("low", "high", "count")],
                },
            },
            {
                "data": {"name": "levels"},
                "mark": {"type": "rule", "opacity": 0.45, "strokeWidth": 0.6},
                "encoding": {"x": {"field": "at", "type": "quantitative"}},
            },
            {
                "data": {"name": "ends"},
                "mark": {"type": "rule", "color": OKABE_ITO[1], "strokeWidth": 2, "strokeDash": [5, 3]},
                "encoding": {"x": {"field": "at", "type": "quantitative"},
                             "tooltip": [{"field": "what"}, {"field": "at", "type": "quantitative"}]},
            },
        ],
    }  # fmt: skip


def depth(subject: PageData) -> Spec | None:
    """SQNR of each block's output, in their order."""
    record = next((card.sensitivity for card in subject.cards if card.sensitivity), None)
    if record is None:
        return None
    values = [{"block": name, "dB": sqnr} for name, sqnr in record["profile"].items() if sqnr is not None]
    return {
        **spec(f"Error through the depth, {record['policy']}, {record['pictures']} pictures", values),
        "width": "container",
        "height": 220,
        "mark": {"type": "line", "point": True, "color": OKABE_ITO[0]},
        "encoding": {
            "x": {"field": "block", "type": "nominal", "sort": None, "title": "output of"},
            "y": {"field": "dB", "type": "quantitative", "title": "SQNR, dB", "scale": {"zero": False}},
            "tooltip": [{"field": "block"}, {"field": "dB", "type": "quantitative", "format": ".2f"}],
        },
    }


def accuracy_and_latency(subjects: Sequence[PageData]) -> Spec | None:
    """Every result with a latency that is an engine's own, no simulation's: top-1 against milliseconds a picture."""
    measured = [
        (card, result)
        for card, result in _results(subjects)
        if result.ms_per_picture is not None and not is_simulated(result.engine)
    ]
    values = [
        {"ms": result.ms_per_picture, "top-1": result.acc1, "engine": result.engine,
         "what": " ".join(str(word) for word in (card.name, result.policy, result.weights, result.precision) if word),
         "type": result.precision, "±": result.delta_acc1_se, "Δ top-1": result.delta_acc1}
        for card, result in measured
    ]  # fmt: skip
    if len(values) < 2:
        return None
    shown = [result.acc1 for _, result in measured]
    middle, half = (min(shown) + max(shown)) / 2, max(1.0, 0.55 * (max(shown) - min(shown)))  # hundredths are no abyss
    figures = [{"field": key, "type": "quantitative", "format": ".3~f"} for key in ("top-1", "Δ top-1", "±", "ms")]
    return {
        **spec("Accuracy against latency, of what was measured", values),
        "width": "container",
        "height": 300,
        "mark": {"type": "point", "filled": True, "size": 90},
        "encoding": {
            "x": {"field": "ms", "type": "quantitative", "title": "ms a picture"},
            "y": {
                "field": "top-1",
                "type": "quantitative",
                "title": "top-1, %",
                "scale": {"domain": [middle - half, middle + half], "nice": False},
            },
            "color": {"field": "engine", "type": "nominal", "scale": {"range": OKABE_ITO}},
            "shape": {"field": "type", "type": "nominal"},
            "tooltip": [{"field": "what"}, {"field": "engine"}, *figures],
        },
    }


def _results(subjects: Sequence[PageData]) -> list[tuple[RunCard, Result]]:
    return [(card, result) for subject in subjects for card in subject.cards for result in card.measured()]
