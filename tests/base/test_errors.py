"""Errors carry their exit code, and lists of names stay short."""

from swin_quant.base.errors import SwinQuantError, UsageError, listed


def test_a_message_is_one_printable_line_whoever_worded_it():
    hostile = "x.onnx: unknown \x1b[31m\u202etype\n  at line\r\n2, \ud800 é \x00"
    assert str(SwinQuantError(hostile)) == "x.onnx: unknown \\x1b[31m\\u202etype   at line 2, \\ud800 é \\x00"
    assert len(str(UsageError("x" * 10**6))) < 2000


def test_a_list_names_the_first_and_counts_the_rest():
    assert listed(str(n) for n in range(7)) == "0, 1, 2, 3, 4 and 2 more"
    assert listed(["a", "b"]) == "a, b" and listed([]) == ""
    assert listed("abc", limit=1) == "a and 2 more"
