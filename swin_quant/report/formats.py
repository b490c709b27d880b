"""The forms that the table has, by the suffix of a file."""

SUFFIXES = {".txt": "terminal", ".md": "markdown", ".csv": "csv", ".json": "json"}
