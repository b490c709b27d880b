"""Standard output: how wide it is, whether it shows colours, and text of any alphabet printed on it."""

import os
import shutil
import sys

from swin_quant.report.column import ReportTable, Row
from swin_quant.report.terminal import terminal

NARROW, WIDE = 100, 140  # columns of what is no terminal: a file or a pipe


def width(otherwise: int = WIDE) -> int:
    """The columns of the terminal; `otherwise` where there is none."""
    return shutil.get_terminal_size((otherwise, 0)).columns


def has_colors() -> bool:
    """Whether to write ANSI styles (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def print_text(text: str) -> None:
    """Print to standard output; what its encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


def print_table(table: ReportTable[Row]) -> None:
    """Print a table, as wide as the terminal."""
    print_text(terminal(table, width(), has_colors()))
