"""Calibrate a checkpoint on 80 pictures, score it beside its float model, save it.

python examples/calibrate.py swin_tiny_patch4_window7_224.pth imagenet out/swin_tiny_calib.pth
"""

import sys

import swin_quant as sq

checkpoint, data, target = sys.argv[1:]
model = sq.load(checkpoint)
sq.calibrate(model, sq.pictures(data, "train", 80), "qdq")
result = sq.evaluate(model, sq.pictures(data, "val"))
print(result)
print(f"INT8 is {result.quantized.delta_acc1:+.2f} points from float32, +- {result.quantized.delta_acc1_se:.2f}")
print("saved:", model.save(target))
