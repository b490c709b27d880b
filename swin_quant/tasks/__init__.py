"""One file a verb: what the commands and the Python face call."""
