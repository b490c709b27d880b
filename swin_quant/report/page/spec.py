"""What every chart of the page begins with: a Vega-Lite specification (https://vega.github.io/vega-lite/).

Colours are viridis and the Okabe-Ito set, which people with any colour vision tell apart; what a colour says, a shape,
a label or the table says, too.
"""

from collections.abc import Sequence
from typing import Any

Spec = dict[str, Any]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
OKABE_ITO = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f"]


def spec(title: str, values: Sequence[Any]) -> Spec:
    """A chart of `values`, rows of a table, with a title; without them, of data that the page gives it."""
    data = {"data": {"values": list(values)}} if values else {}
    # From the chart's own left edge, so that it is whole on a phone, too.
    head = {"title": {"text": title, "anchor": "start", "frame": "bounds", "fontSize": 12}} if title else {}
    return {"$schema": SCHEMA, **head, "description": title, "background": None, **data}
