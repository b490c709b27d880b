"""Anything that maps images to logits, and the loops that carry pictures through it."""
