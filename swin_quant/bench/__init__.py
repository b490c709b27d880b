"""Latency, memory and agreement of engines, each in a process of its own, all in the same interleaved rounds."""
