"""Rows hold what was measured, deltas are arithmetic on it, and nothing else gets a number."""

from functools import partial

import pytest
from cards_of_results import CIFAR, card_of

from swin_quant.cards.records import Result
from swin_quant.report.accuracy.rows import COLUMNS, delta_with_error, list_rows
from swin_quant.report.table import records

IMAGENET = {"name": "imagenet", "split": "val", "pictures": 50000, "sha256": "0" * 64}
# FasterTransformer's guide: acc@1, acc@5, acc@1(I), acc@5(I), and the differences by subtraction.
GUIDE = {
    "swin_tiny": (81.182, 95.522, 80.748, 95.328, "-0.434", "-0.194"),
    "swin_small": (83.214, 96.242, 82.904, 96.196, "-0.310", "-0.046"),  # the guide prints -0.288, -0.036
    "swin_base": (83.424, 96.446, 83.116, 96.322, "-0.308", "-0.124"),  # the guide prints -0.354, -0.144
    "swinv2_small": (84.1, 97.0, 83.90, 97.5, "-0.200", "+0.500"),  # the guide prints -0.30
}


def result(precision, acc1, acc5=95.0, dataset=IMAGENET, policy=None, engine=None, **more) -> Result:
    engine = engine or ("torch fake-quant" if policy else "torch")
    return Result(engine, precision, policy, dataset, dataset["pictures"], acc1, acc5, None, 32, "cpu", **more)


card = partial(card_of, size=224)


def cells(*cards) -> list[dict[str, object]]:
    return records(COLUMNS, list_rows(cards))


@pytest.mark.parametrize("name", GUIDE)
def test_deltas_are_the_difference_of_the_columns_whatever_a_guide_prints(name):
    acc1, acc5, int1, int5, delta1, delta5 = GUIDE[name]
    (row,) = cells(card(result("float32", acc1, acc5), result("int8", int1, int5, policy="ft-mode1")))
    found = (row["acc1"], row["acc5"], row["quantized_acc1"], row["quantized_acc5"])
    assert found == (acc1, acc5, int1, int5)
    assert (f"{row['delta_acc1']:+.3f}", f"{row['delta_acc5']:+.3f}") == (delta1, delta5)


def test_a_delta_within_two_standard_errors_is_marked_and_another_comparison_s_error_not_shown():
    for delta, error, shown in (
        (-0.434, 0.052, "-0.43 ±0.05"),
        (-0.1, 0.052, "-0.10 ±0.05 ~"),
        (0.08, 0.1, "+0.08 ±0.10 ~"),
        (0.5, 0.1, "+0.50 ±0.10"),
        (-0.5, None, "-0.50"),
    ):
        quantized = result("int8", 80 + delta, policy="p", delta_acc1=delta, delta_acc1_se=error)
        (row,) = list_rows([card(result("float32", 80), quantized)])
        assert delta_with_error(row) == shown
        (row,) = list_rows([card(result("float32", 79), quantized)])
        assert delta_with_error(row) == f"{1 + delta:+.2f}" and row.delta_acc1_se is None


def test_one_row_for_each_card_data_set_and_quantized_result():
    first = card(
        result("float32", 80),
        result("bfloat16", 79.9, ms_per_picture=8.0),
        result("int8", 79.5, policy="ft-mode1"),
        result("W4A8", 75.0, policy="ft-mode1"),
        result("int8", 79.7, policy="ft-mode2", sqnr_db=35.58, agreement=99.1),
        result("float32", 70, dataset=CIFAR),
        result("int8", 69, dataset=CIFAR, policy="ft-mode1"),
    )
    second = card(result("float32", 81), result("int8", 80, policy="qdq"), name="swin_small", calibration=None)
    rows = cells(first, second)
    keys = ("name", "dataset", "policy", "precision", "calibrator", "acc1", "half_acc1", "quantized_acc1", "pictures")
    assert [tuple(row[key] for key in keys) for row in rows] == [
        ("swin_tiny", "imagenet/val", "ft-mode1", "int8", "percentile 99.99", 80, 79.9, 79.5, 50000),
        ("swin_tiny", "imagenet/val", "ft-mode1", "W4A8", "percentile 99.99", 80, 79.9, 75, 50000),
        ("swin_tiny", "imagenet/val", "ft-mode2", "int8", "percentile 99.99", 80, 79.9, 79.7, 50000),
        ("swin_tiny", "cifar10/val", "ft-mode1", "int8", "percentile 99.99", 70, None, 69, 5000),
        ("swin_small", "imagenet/val", "qdq", "int8", None, 81, None, 80, 50000),
    ]
    shown = [rows[2][key] for key in ("sqnr_db", "agreement", "half_precision", "half_ms")]
    assert shown == [35.58, 99.1, "bfloat16", 8.0]
    assert rows[0]["resolution"] == 224 and rows[0]["engine"] == "torch fake-quant"
    assert [row["name"] for row in cells(second, first)] == ["swin_small", *["swin_tiny"] * 4], "as cards are named"


def test_float8_is_a_quantized_row_beside_int8_of_the_same_checkpoint():
    """A float8 row has a calibrator, a delta and its engine's own float; half precision is a baseline."""
    results = (
        result("float32", 80.0),
        result("float32", 79.9, engine="onnxruntime", ms_per_picture=9.0),
        result("int8", 79.5, policy="tensorrt", engine="onnxruntime"),
        result("fp8", 79.75, policy="tensorrt-fp8", engine="onnxruntime", delta_acc1=-0.25, delta_acc1_se=0.1),
    )
    own, int8, fp8 = cells(card(*results))
    found = [own[key] for key in ("precision", "acc1", "quantized_acc1", "delta_acc1")]
    assert found == ["float32", 80, 79.9, 79.9 - 80]
    assert fp8["precision"] == "fp8" and fp8["policy"] == "tensorrt-fp8"
    assert (fp8["acc1"], fp8["quantized_acc1"], fp8["delta_acc1"]) == (80, 79.75, -0.25)
    for key in ("calibrator", "own_precision", "own_acc1", "own_ms", "engine"):
        assert fp8[key] == int8[key] is not None


def test_a_float32_result_on_other_pictures_is_no_baseline():
    rows = cells(card(result("float32", 70, dataset=CIFAR), result("int8", 79.5, policy="p")))
    found = [[row[key] for key in ("dataset", "acc1", "quantized_acc1", "delta_acc1")] for row in rows]
    assert found == [["cifar10/val", 70, None, None], ["imagenet/val", None, 79.5, None]]


def test_the_engine_s_fastest_float_form_of_the_same_weights_is_shown_beside_int8_from_whichever_card():
    quantized = card(
        result("float32", 80.0, ms_per_picture=50.0),
        result("int8", 79.0, policy="qdq", engine="openvino", ms_per_picture=3.0),
        result("int8", 79.0, policy="qdq", engine="onnxruntime", ms_per_picture=4.0),
    )
    slow = card(result("float32", 80.0, engine="openvino", ms_per_picture=9.0))
    fast = card(result("bfloat16", 79.9, engine="openvino", ms_per_picture=6.0))
    others = [
        card(result("bfloat16", 1.0, engine="openvino", ms_per_picture=0.1), sha256="b" * 64),  # other weights
        card(result("bfloat16", 1.0, engine="openvino", ms_per_picture=0.1, dataset=CIFAR)),  # other pictures
    ]
    rows = {row["engine"]: row for row in cells(quantized, slow, fast, *others) if row["precision"] == "int8"}
    shown = [[rows[engine][key] for key in ("own_precision", "own_acc1", "own_ms")] for engine in rows]
    assert list(rows) == ["openvino", "onnxruntime"] and shown == [["bfloat16", 79.9, 6.0], [None] * 3]
