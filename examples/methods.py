"""Which way of finding ranges suits a model at few bits? Try them on training pictures, not on those that score.

python examples/methods.py swin_tiny_patch4_window7_224.pth imagenet 4
"""

import sys

import swin_quant as sq

checkpoint, data, bits = sys.argv[1], sys.argv[2], int(sys.argv[3])
policy = sq.policy("qdq").bits("*", bits)
held_back = sq.pictures(data, "train", 64, seed=1)
for method in ("percentile", "max", "mse", "entropy"):
    model = sq.calibrate(sq.load(checkpoint), sq.pictures(data, "train", 80), policy, method=method)
    result = sq.evaluate(model, held_back, half="none").quantized
    print(f"{method:10} {result.sqnr_db:6.1f} dB, agrees with float on {result.agreement:5.1f} % of the pictures")
