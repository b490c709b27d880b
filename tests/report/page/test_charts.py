"""The chart of accuracy and latency compares an engine's int8 with its own float alone."""

import dataclasses

from cards_of_results import CIFAR, card_of

from swin_quant.cards.records import Result
from swin_quant.report.page.charts import accuracy_and_latency
from swin_quant.report.page.data import PageData

TORCH = Result("torch", "float32", None, CIFAR, 5000, 80.0, 98.0, None, 32, "cpu", ms_per_picture=0.5)
OWN = dataclasses.replace(TORCH, engine="openvino", ms_per_picture=1.4)
INT8 = dataclasses.replace(OWN, precision="int8", policy="cpu", ms_per_picture=0.7)
SIMULATED = dataclasses.replace(INT8, engine="torch fake-quant", ms_per_picture=9.0)


def points(*results):
    spec = accuracy_and_latency([PageData("x", [card_of(*results)])])
    return spec and [(one["engine"], one["type"], one["ms"]) for one in spec["data"]["values"]]


def test_what_runs_no_quantized_file_is_not_in_it():
    """Torch's bfloat16 may be faster than another engine's int8: no reader should take that for the gain of INT8."""
    half = dataclasses.replace(TORCH, precision="bfloat16", ms_per_picture=0.3)
    assert points(TORCH, half, SIMULATED, OWN, INT8) == [("openvino", "float32", 1.4), ("openvino", "int8", 0.7)]


def test_a_single_point_is_no_chart():
    assert points(TORCH, SIMULATED) is None and points(TORCH, INT8) is None
