"""What users call calibrators and modes, apart from the code behind them: a parser is built without torch."""

CALIBRATORS = ("percentile", "max", "mse", "entropy")
DEFAULT_PERCENTILE = 99.99
INT8_MODES = {1: "ft-mode1", 2: "ft-mode2"}  # FasterTransformer's modes and our names for them
