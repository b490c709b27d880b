"""One file a verb: its options, the function that Python calls, and the command that loads, calls, saves and prints."""
