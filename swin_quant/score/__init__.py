"""Engines (anything that maps images to logits), the loop that carries pictures through them, metrics, latency."""
