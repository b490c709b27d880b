"""A footnote names a figure that a reader could misunderstand, and the rows that have it."""

import dataclasses

import pytest
from cards_of_results import CIFAR as DATASET
from cards_of_results import VERIFICATION
from cards_of_results import card_of as card

from swin_quant.cards.records import Result
from swin_quant.report.accuracy.rows import footnotes, list_rows, numbered

FLOAT = Result("torch", "float32", None, DATASET, 5000, 80.0, 98.0, None, 32, "cpu")
INT8 = dataclasses.replace(FLOAT, engine="onnxruntime", precision="int8", policy="qdq", acc1=79.0)


def said(*cards, untimed=False) -> list[str]:
    """The sentences of the footnotes; most cards here have no latency, and `untimed` keeps the sentence about it."""
    rows = list_rows(cards)
    notes, _ = numbered(footnotes(rows), len(rows))
    return [note for note in notes if untimed or "not timed: " not in note]


def with_(result, **changes) -> Result:
    return dataclasses.replace(result, **changes)


TIMED, ELSEWHERE = with_(FLOAT, ms_per_picture=12.0), {**DATASET, "sha256": "2" * 64}
AGAIN = card(with_(FLOAT, acc1=80.5), INT8, name="again")
SAID = {
    "float32 on cpu, batch 32; int8 on cuda, batch 1": [
        card(TIMED, with_(INT8, ms_per_picture=5.0, batch_size=1, device="cuda"))
    ],
    "float32 was not scored on cifar10/val, so there is no delta": [card(INT8), card(FLOAT, INT8, name="other")],
    "float32 5000, int8 4990": [card(FLOAT, with_(INT8, pictures=4990))],
    "no standard error": [card(FLOAT, with_(INT8, delta_acc1=-0.5, delta_acc1_se=0.1))],
    "80.000 / 98.000 and 80.500 / 98.000": [card(FLOAT, INT8), AGAIN],
    "compare within one table": [
        card(FLOAT, INT8),
        card(with_(FLOAT, dataset=ELSEWHERE), with_(INT8, dataset=ELSEWHERE)),
    ],
    "4 dead nodes (only zeros seen in calibration): a, b, c and 1 more": [
        card(FLOAT, INT8, dead_nodes=["a", "b", "c", "d"])
    ],
}
UNSAID = {
    "a plain row": [card(FLOAT, INT8)],
    "equal settings": [card(TIMED, with_(INT8, ms_per_picture=5.0))],
    "its own error": [card(FLOAT, with_(INT8, delta_acc1=-1.0, delta_acc1_se=0.1))],
    "two cards of one accuracy": [card(FLOAT, INT8), card(FLOAT, INT8, name="again")],
    "other weights": [card(FLOAT, INT8), card(with_(FLOAT, acc1=80.5), INT8, name="another", sha256="b" * 64)],
}


@pytest.mark.parametrize("words", SAID)
def test_what_could_be_misunderstood_is_explained(words):
    (note,) = said(*SAID[words])
    assert words in note


@pytest.mark.parametrize("what", UNSAID)
def test_nothing_is_said_of(what):
    assert said(*UNSAID[what]) == []


def test_unreadable_pictures_are_counted_and_named_and_other_notes_kept_on_one_bounded_line():
    two = {"unreadable": 2, "note": "unreadable: a.png, b.png"}
    left_out = "unreadable pictures of cifar10/val left out"
    assert said(card(with_(FLOAT, **two), with_(INT8, **two))) == [f"2 {left_out}: a.png, b.png"]
    assert said(card(FLOAT, with_(INT8, unreadable=1))) == ["1 unreadable picture of cifar10/val left out"]
    other = with_(INT8, unreadable=2, note="int8 kernels checked")
    assert said(card(FLOAT, other)) == [f"2 {left_out}", "int8 kernels checked"]
    (note,) = said(card(FLOAT, with_(INT8, note="line one\nline two " + "x" * 5000)))
    assert note.startswith("line one\\nline two") and note.isprintable() and len(note) < 400


def test_a_footnote_of_some_rows_has_a_number_which_they_bear():
    two = {"unreadable": 2, "note": None}
    bad, good = with_(INT8, **two), with_(INT8, policy="ft-mode1")
    rows = list_rows([card(FLOAT, good, bad), card(FLOAT, INT8, name="other", dead_nodes=["a.b"])])
    notes, marks = numbered([note for note in footnotes(rows) if "not timed" not in note.text], len(rows))
    assert [note[:5] for note in notes] == ["[1] 2", "[2] 1"] and marks == {1: "1", 2: "2"}
    assert "unreadable" in notes[0] and "dead" in notes[1]
    assert numbered(footnotes(rows[:1]), 1)[1] == {}, "what is said of all rows needs no number"


def test_a_verification_is_a_word_in_its_row_and_a_failure_is_told_with_its_figures():
    record = VERIFICATION | {"engine": "onnxruntime"}
    against_float = {**record, "reference": "torch float32", "tolerance": None, "passed": None}
    verified = card(FLOAT, INT8).with_verification(record).with_verification(against_float)
    assert said(verified) == [] and [row.verified for row in list_rows([verified])] == ["yes"]
    failed = verified.with_verification({**record, "mean": 0.2, "passed": False})
    (note,) = said(failed)
    assert "0.2 (max 0.5, top-1 agreement 98.4 %), more than 0.1" in note and "float32" not in note
    assert [row.verified for row in list_rows([failed])] == ["NO"]
    elsewhere = card(FLOAT, with_(INT8, engine="openvino")).with_verification(record)
    assert said(elsewhere) == [] and [row.verified for row in list_rows([elsewhere])] == [None]
