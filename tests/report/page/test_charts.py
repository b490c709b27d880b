"""The chart of accuracy and latency compares an engine's int8 with its own float alone."""

import dataclasses

from cards_of_results import INT8, OWN, TORCH, card_of

from swin_quant.report.page.charts import accuracy_and_latency
from swin_quant.report.page.data import PageData

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
