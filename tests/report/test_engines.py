"""The table of a bench: the same rows in every form, nothing cut, and bench_notes that say what figures mean."""

import csv
import io
import json
from dataclasses import fields, replace

import pytest

from swin_quant.report.engines import BENCH_FILES, bench_table
from swin_quant.report.table import terminal
from swin_quant.score.bench import BenchPlan, BenchReport, BenchRow

PLAIN = BenchRow(
    *("torch float32", "torch", "float32", None, 1, 12.345, 13.5, 81.0, 40, None, None, 512.4, 300.0, 4.25),
    *(0, 10, None, None, None, "torch 2.13", None),
)
FASTER = {"p50_ms": 3.21, "baseline": "torch float32", "speedup": 3.85}
INT8 = replace(PLAIN, candidate="onnxruntime int8 | mine", int8_gemms=9, sqnr_db=31.44, agreement=97.66, **FASTER)
UNTIMED = dict.fromkeys(("p50_ms", "p90_ms", "images_per_s", "int8_gemms", "all_gemms"))
FAILED = replace(PLAIN, candidate="broken", failure="broken: its process ended with signal 11 (SIGSEGV)", **UNTIMED)


@pytest.fixture
def report():
    rows = [replace(row, batch=batch) for batch in (1, 8) for row in (PLAIN, INT8, FAILED)]
    gemms = {"torch float32": {"head": "float32"}}
    return BenchReport("swin_micro", rows, "torch float32", BenchPlan((1, 8), 2, 0.5, 1), "5 pictures", gemms=gemms)


def test_the_table_has_the_same_rows_in_every_form(report):
    text, markdown = terminal(bench_table(report), 140), BENCH_FILES["bench.md"](report)
    for name in ("torch float32", "onnxruntime int8 | mine", "broken"):
        assert text.count(f" {name} ") >= 2 and markdown.count(f"| {name.replace('|', '&#124;')} |") == 2
    for figure in ("12.35", "3.21", "3.85", "512", "9/10", "31.4", "97.7"):
        assert text.replace("\n", " ").count(f" {figure} ") >= 2 and f"| {figure} |" in markdown
    rows = list(csv.DictReader(io.StringIO(BENCH_FILES["bench.csv"](report))))
    assert [row["candidate"] for row in rows] == [row.candidate for row in report.rows]
    assert rows[0].keys() == {field.name for field in fields(BenchRow)}
    assert float(rows[0]["p50_ms"]) == 12.345 and rows[2]["p50_ms"] == ""
    content = json.loads(BENCH_FILES["bench.json"](report))
    assert content["schema"] == "swin-quant/bench/1" and content["rows"][1]["sqnr_db"] == 31.44
    assert content["plan"]["threads"] == 1 and content["gemms"]["torch float32"] == {"head": "float32"}


def test_accuracy_is_a_column_if_it_was_measured_and_a_narrow_terminal_cuts_nothing(report):
    assert "acc@1" not in terminal(bench_table(report), 140) and "acc@1" not in BENCH_FILES["bench.md"](report)
    labelled = [replace(row, acc1=81.25) for row in report.rows]
    assert "81.25" in BENCH_FILES["bench.md"](replace(report, rows=labelled))
    shown = terminal(bench_table(report), width=80)
    assert all(word in shown for row in report.rows for word in row.candidate.split())
    assert " 12.35 " in shown and " 97.7\n" in shown
