"""What users call calibrators, passes and modes, apart from the code behind them: a parser is built without torch."""

CALIBRATORS = ("max", "percentile", "mse", "entropy")  # a file each in `range_methods`
AUTO = "auto"  # each node by the one that costs what is behind it least (`choice`)
# A file each in `passes`.
PASSES = ("equalize", "ridge", "gptq", "range_search", "reconstruct", "distill")
DEFAULT_PERCENTILE = 99.99
# The calibrator where none is asked for: that of the largest number of bits which a node reaches. Chosen on training
# pictures (docs/results/calibrators.md): at 8 bits all but entropy are alike, and below them the coarse steps of a grid
# as wide as percentile's cost more than clipping.
BY_BITS = {8: "percentile", 2: "mse"}
INT8_MODES = {1: "ft-mode1", 2: "ft-mode2"}  # FasterTransformer's modes and our names for them
SEARCHED_ON = 1024  # pictures that tell a search what policies lose: some ten of them, where that is about 0.1 points
