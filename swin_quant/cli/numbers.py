"""Whole numbers of the command line, within what every library behind it can hold."""

import argparse

LARGEST = 2**31 - 1


def whole(text: str) -> int:
    """An `int` for argparse; ArgumentTypeError for what is none, or is beyond LARGEST."""
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number") from error
    if abs(number) > LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:40]} is beyond {LARGEST}")
    return number
