"""Errors carry their exit code, and lists of names stay short."""

from swin_quant.base.errors import SwinQuantError, UsageError, listed


def test_exit_codes():
    assert (SwinQuantError.exit_code, UsageError.exit_code) == (1, 2)
    assert isinstance(UsageError("x"), SwinQuantError)


def test_a_list_names_the_first_and_counts_the_rest():
    assert listed(str(n) for n in range(7)) == "0, 1, 2, 3, 4 and 2 more"
    assert listed(["a", "b"]) == "a, b" and listed([]) == ""
    assert listed("abc", limit=1) == "a and 2 more"
