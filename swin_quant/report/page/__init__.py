"""The page: sections with tables and charts, in one file that fetches nothing; all text is escaped."""

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swin_quant.base.errors import listed, one_line
from swin_quant.base.extras import library
from swin_quant.base.files import finite
from swin_quant.cards.card import RunCard, without_paths
from swin_quant.cards.records import TriedPolicies
from swin_quant.report.accuracy import AccuracyTable
from swin_quant.report.page.data import (
    PageData,
    accuracy_and_latency,
    asset,
    depth,
    make_spec,
    network,
    searched,
    training,
)
from swin_quant.report.table import Column, ReportTable, html_table
from swin_quant.report.verdict import DIR, DeployVerdict, best_first
from swin_quant.score.scoring import Guess

MOST_NODES = 2000  # rows that a browser sorts within a second
_SNIPPET = "window.vegaEmbed = vegaEmbed;"  # makes the library visible to the page's own script
_COLUMNS = (
    ("name", "node", False),
    ("role", "role", False),
    ("state", "type", False),
    ("grid", "grid", False),
    ("amax", "amax", True),
    ("low", "low", True),
    ("high", "high", True),
    ("clipped", "clipped %", True),
    ("sqnr_db", "SQNR dB", True),
    ("costs_db", "costs dB", True),
)

_ALONE = "swin-quant report CARD.json --html nodes.html"
_RUN_THERE, _IS_DIR = "Commands run in the folder of this page", f"; {DIR} is your folder of pictures"
_VERDICT = (
    Column[DeployVerdict]("deploy", "deploy", lambda one: one.choice),
    Column[DeployVerdict]("result", "result", lambda one: one.summary),
    Column[DeployVerdict]("next", "next", lambda one: one.next),
)


def page(checkpoints: Sequence[PageData]) -> str:
    """The whole page. UsageError if the library that draws charts is not installed."""
    drawing = library("vl_convert", "report").javascript_bundle(_SNIPPET)
    cards = [card for checkpoint in checkpoints for card in checkpoint.cards.values()]
    shown = next((checkpoint for checkpoint in checkpoints if checkpoint.nodes), None)
    drawn = _charts(checkpoints, cards, shown)
    facts = json.dumps(finite(_facts(shown, drawn)), ensure_ascii=True, separators=(",", ":"))
    sections = dict(_sections(checkpoints, cards, shown, drawn))
    names = list(dict.fromkeys(checkpoint.title for checkpoint in checkpoints))
    title = f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}: quantized beside float"
    when = " to ".join(sorted({day(card.created for card in cards)[:10] for day in (min, max)}))
    parts = {
        "title": _text(title),
        "lead": _text(f"{len(cards)} run card{'s' if len(cards) > 1 else ''}, {when}."),
        "nav": " ".join(f'<a href="#{key}">{heading}</a>' for key, (heading, _) in sections.items()),
        "sections": "\n".join(
            f'<section id="{key}" aria-labelledby="{key}-h"><h2 id="{key}-h">{heading}</h2>{body}</section>'
            for key, (heading, body) in sections.items()
        ),
        "footer": "Every figure was measured, or is left out. Written by `swin-quant report`.",
        "style": asset("page.css"),
        # JSON that an HTML parser cannot mistake for markup
        "facts": facts.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        "library": drawing.replace("</script", "<\\/script"),
        "script": asset("page.js"),
    }
    return re.sub(r"\{\{([a-z]+)\}\}", lambda place: parts[place[1]], asset("page.html"))


def _facts(shown: PageData | None, drawn: Mapping[str, Any]) -> dict[str, Any]:
    """The data that the page's script reads."""
    nodes = shown.nodes[:MOST_NODES] if shown else ()
    engines = list(dict.fromkeys(title for node in nodes for title in node.engines))
    columns = [*_COLUMNS, *((title, title, False) for title in engines)]
    rows = []
    for node in nodes:
        row = {key: value for key, value in asdict(node).items() if key not in ("bins", "engines", "row", "column")}
        rows.append({**row, "state": node.kind if node.on else "float", **node.engines})
    return {
        "charts": {place: spec for place, spec in drawn.items() if spec},
        "columns": [{"key": key, "title": title, "number": number} for key, title, number in columns],
        "nodes": rows,
        "bins": {node.name: asdict(node.bins) for node in nodes if node.bins},
        "values": make_spec("values", ""),  # which the script gives `bins` and `ends`
    }


def _charts(checkpoints: Sequence[PageData], cards: Sequence[RunCard], shown: PageData | None) -> dict[str, Any]:
    """The chart of each place on the page; None for nothing to draw."""
    searches: list[TriedPolicies] = []  # the timed ones; an artifact's card repeats those of its checkpoint
    for record in (record for card in cards for record in card.searches):
        if record not in searches and all(one["ms"] is not None for one in record["tried"]):
            searches.append(record)
    return {
        "latency-chart": accuracy_and_latency(checkpoints),
        "network-chart": network(shown.nodes) if shown else None,
        "depth-chart": next((spec for checkpoint in checkpoints if (spec := depth(checkpoint))), None),
        "training-chart": training([card for card in cards if card.training]),
        **{f"search-chart-{number}": searched(record) for number, record in enumerate(searches)},
    }


def _sections(
    checkpoints: Sequence[PageData], cards: Sequence[RunCard], shown: PageData | None, drawn: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[str, str]]]:
    if verdicts := [verdict for checkpoint in checkpoints for verdict in checkpoint.verdicts]:
        table = html_table(ReportTable(_VERDICT, best_first(verdicts)))
        told = _RUN_THERE + _IS_DIR * any(DIR in verdict.next.split() for verdict in verdicts)
        yield "deploy", ("Deploy", f'<p class="dim">{told}.</p><div class="cards">{table}</div>')
    yield "accuracy", ("Accuracy", f'<div class="wide cards">{AccuracyTable.from_cards(cards).html()}</div>')
    if drawn["latency-chart"]:
        yield "latency", ("Accuracy and latency", '<div class="chart" id="latency-chart"></div>')
    advice = dict.fromkeys(
        f"<li><b>{_text(card.name)}</b>: {_with_commands(_text(one['text']))}</li>"
        for card in cards
        if card.calibration
        for one in card.calibration.get("advice", [])
    )
    if advice:
        yield "advice", ("Advice", f"<ul>{''.join(advice)}</ul>")
    if shown:
        others = [other for other in checkpoints if other.nodes and other is not shown]
        yield "nodes-of", ("Nodes", _nodes(shown, others))
    elif missing := [checkpoint for checkpoint in checkpoints if checkpoint.missing]:
        yield "nodes-of", ("Nodes", "".join(f'<p class="dim">{_text(one.missing)}</p>' for one in missing))
    if drawn["depth-chart"]:
        yield "depth", ("Error through the depth", '<div class="chart" id="depth-chart"></div>')
    if places := [place for place in drawn if place.startswith("search")]:
        yield "policies", ("Policies tried", "".join(f'<div class="chart" id="{place}"></div>' for place in places))
    if drawn["training-chart"]:
        yield "training", ("Training", '<div class="chart" id="training-chart"></div>')
    if compared := [checkpoint for checkpoint in checkpoints if checkpoint.compared]:
        yield "pictures", ("Pictures classified otherwise", "".join(map(_pictures, compared)))
    contents = {
        place: json.dumps(finite(without_paths(card)), indent=1, ensure_ascii=False)
        for checkpoint in checkpoints
        for place, card in checkpoint.cards.items()
    }
    details = (
        f"<details><summary>{_text(place)}</summary><pre>{html.escape(content)}</pre></details>"
        for place, content in contents.items()
    )
    yield "cards", ("Run cards", "".join(details))


def _nodes(data: PageData, others: Sequence[PageData]) -> str:
    names = _text(listed([_name(other) for other in others]))
    more = f" For the nodes of {names}: <code>{_ALONE}</code>." if others else ""
    on = sum(node.on for node in data.nodes)
    cut = f", the first {MOST_NODES} are shown" if len(data.nodes) > MOST_NODES else ""
    missing = f'<p class="dim">{_text(data.missing)}</p>' if data.missing else ""
    return f"""<p>{_text(_name(data))}: {on} of {len(data.nodes)} nodes on{cut}. SQNR: of the node's own values
after quantization; costs: the rise of the logits' SQNR without the node (<code>swin-quant sensitivity</code>). Choose a
cell of the picture or a name in the table to see the node's values, with the ends of its range dashed.{more}</p>
{missing}
<div class="chart" id="network-chart"></div>
<h3 id="values-title">Choose a node</h3><div class="chart" id="values" aria-live="polite"></div>
<label>Search <input type="search" id="search" placeholder="fc2 input"></label> <span id="found" class="dim"></span>
<div id="nodes" tabindex="0" role="region" aria-label="Nodes">
<table><thead><tr></tr></thead><tbody></tbody></table></div>
"""


def _name(data: PageData) -> str:
    """The model, and the file of its checkpoint."""
    files = (Path(place).with_name(one.checkpoint["file"]) for place, one in data.cards.items() if one.checkpoint)
    return data.title + next((f" ({file.as_posix()})" for file in files), "")


def _pictures(data: PageData) -> str:
    def listed(who: str, seen: Sequence[Guess]) -> str:
        lines = "".join(f"<li>{_text(guess.name)} {100 * guess.probability:.1f} %</li>" for guess in seen)
        return f"<div><b>{who}</b><ol>{lines}</ol></div>"

    figures = (
        f'<figure><img alt="" src="data:image/jpeg;base64,{one.thumbnail}"><figcaption>{_text(one.picture)}'
        f" <span class=dim>({_text(one.label)})</span></figcaption>"
        f"{listed('float', one.float_sees)}{listed('quantized', one.quantized_sees)}</figure>"
        for one in data.disagreements
    )
    shown = len(data.disagreements)
    cut = "" if shown == data.otherwise else f"; the {shown} with the largest divergence are shown"
    head = f"<p>{_text(_name(data))}, {_text(data.policy)}: the quantized model classifies {data.otherwise} of "
    told = f"{head}{data.compared} pictures differently from float{cut}.</p>"
    return f'{told}<div class="pictures">{"".join(figures)}</div>'


def _with_commands(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", text)


def _text(text: str) -> str:
    return html.escape(one_line(text))
