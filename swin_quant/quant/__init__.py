"""Quantization: nodes, the fake-quant op, observers, range searches, policies and passes. It knows no architecture."""

CALIBRATORS = ("max", "percentile", "mse", "entropy")  # each a file in `range_methods`
AUTO = "auto"  # a policy that a search finds
# Each a file in `passes`.
PASSES = ("equalize", "bias_correction", "gptq", "range_search", "reconstruct", "distill")
DEFAULT_PERCENTILE = 99.99
# A node's default calibrator: that of the largest number here that its bits reach. Chosen on training pictures
# (docs/results/accuracy.md): at 8 bits all but entropy are alike; with fewer bits the coarse steps of percentile's
# wide grid cost more than clipping.
BY_BITS = {9: "max", 8: "percentile", 2: "mse"}
INT8_MODES = {1: "ft-mode1", 2: "ft-mode2"}  # FasterTransformer's modes and our names for them
CALIBRATED_ON = 80  # pictures of a calibration
SEARCHED_ON = 1024  # pictures of a search; one of them is 0.1 points
GROUP_KINDS = ("role", "stage", "block", "layer", "node")  # groups of nodes whose cost `sensitivity` measures
