"""Run cards: the JSON beside every checkpoint and artifact, and where a model came from."""
