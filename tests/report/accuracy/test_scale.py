"""Twice the cards are twice the work, in every form: counted in calls, not in seconds."""

import dataclasses
import sys

import pytest

from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result
from swin_quant.report.accuracy.render import FORMATS, render

DATASET = {"name": "cifar10", "split": "val", "pictures": 5000, "sha256": "1" * 64}
FLOAT = Result("torch", "float32", None, DATASET, 5000, 80.0, 98.0, None, 32, "cpu", ms_per_picture=12.0)


def unlike_cards(count: int) -> list[RunCard]:
    """Each with a heading, an engine's own float form and footnotes of its own; baselines are of two checkpoints."""
    cards = []
    for number in range(count):
        quantized = dataclasses.replace(FLOAT, precision="int8", policy=f"p{number}", acc1=79.0 - number / 1000)
        results = (
            dataclasses.replace(FLOAT, ms_per_picture=12.0 + number),
            dataclasses.replace(FLOAT, precision="bfloat16"),
            dataclasses.replace(FLOAT, precision="float16", acc1=79.5),
            dataclasses.replace(FLOAT, engine="openvino", ms_per_picture=3.0),
            dataclasses.replace(quantized, engine="torch fake-quant", unreadable=1),
            dataclasses.replace(quantized, engine="openvino", note=f"remark {number}"),
        )
        source = {"file": "x.pth", "sha256": f"{number % 2:064}", "format": "pth"}
        records = [dataclasses.asdict(result) for result in results]
        cards.append(RunCard(f"model_{number:04}", {}, {"size": 32}, source=source, results=records))
    return cards


def calls(function, *arguments) -> int:
    """How many functions are called, Python's own among them."""
    count = 0

    def one_more(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(one_more)
    try:
        function(*arguments)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("form", FORMATS)
def test_work_grows_as_the_cards_do(form):
    render(unlike_cards(2), form)  # what is imported and cached once
    few, many = (calls(render, unlike_cards(count), form) for count in (30, 60))
    assert many < 2.2 * few
