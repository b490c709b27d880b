"""Tables and the page: what was measured or found, as columns of data, in every form. Imports nothing slow."""

FORMATS = ("terminal", "markdown", "csv")  # printed
SUFFIXES = {".md": "markdown", ".csv": "csv", ".json": "json"}  # of the files in a folder of results
