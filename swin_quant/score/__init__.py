"""Engines (functions from images to logits), the loop that runs pictures through them, metrics, latency."""
