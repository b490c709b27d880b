"""Tables of results in every form, their columns as data, and the page. Imports nothing slow."""

FORMATS = ("terminal", "markdown", "csv")  # printed
SUFFIXES = {".md": "markdown", ".csv": "csv", ".json": "json"}  # files in a folder of results
