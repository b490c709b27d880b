"""Which stage costs the most? Leave one after another in float, and compare with the float model.

python examples/own_policy.py swin_tiny_patch4_window7_224.pth imagenet
"""

import sys

import swin_quant as sq

checkpoint, data = sys.argv[1:]
model = sq.load(checkpoint)
everything = sq.policy("qdq").bits("*_weight_quantizer", 4)
sq.calibrate(model, sq.pictures(data, "train", 80), everything)
stages = sorted({node.name.split(".blocks")[0] for node in model.nodes() if ".blocks" in node.name})
policies = [everything, *(everything.off(f"{stage}.*") for stage in stages)]
for result in sq.evaluate(model, sq.pictures(data, "val"), policies, half="none").results:
    if result.policy:
        print(f"{result.policy:60} {result.sqnr_db:6.1f} dB   {result.delta_acc1:+.2f} points")
