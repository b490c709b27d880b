"""A table for programs: every column by its key, unrounded, as CSV or JSON."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from swin_quant.base.files import finite
from swin_quant.report.column import Column, Row, Value


def comma_separated(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    """CSV (RFC 4180): keys, then values, empty where there are none."""
    output = io.StringIO()
    writer = csv.writer(output)
    writer.writerow([column.key for column in columns])
    writer.writerows([_no_formula(column.value(row)) for column in columns] for row in rows)
    return output.getvalue()


def records(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[dict[str, Value]]:
    """A mapping for each row, None where there is no value."""
    return [{column.key: column.value(row) for column in columns} for row in rows]


def json_text(content: Any) -> str:
    """JSON (RFC 8259): indented; what is not finite is null; ASCII, since a file's name may be no valid Unicode."""
    return json.dumps(finite(content), indent=2, allow_nan=False) + "\n"


def _no_formula(value: Value) -> Value:
    """Text that a spreadsheet would take for a formula, made text again."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
