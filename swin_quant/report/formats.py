"""The forms that a table has: what can be printed, and what a folder of results gets, by the suffix of its files."""

FORMATS = ("terminal", "markdown", "csv")
SUFFIXES = {".md": "markdown", ".csv": "csv", ".json": "json"}
