"""The operators that a float model computes: traced, counted, looked up by target, replaced."""
