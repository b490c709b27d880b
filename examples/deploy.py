"""Export a checkpoint for a CPU engine, check that it computes what the model computes, and time it.

python examples/deploy.py swin_tiny_patch4_window7_224.pth imagenet onnxruntime out
"""

import sys
import time

import torch

import swin_quant as sq

checkpoint, data, backend, folder = sys.argv[1:]
model = sq.calibrate(sq.load(checkpoint), sq.pictures(data, "train", 80), "cpu" if backend == "openvino" else "qdq")
engine = sq.export(model, backend, folder).load()
images = torch.randn(8, 3, *model.preprocess.sides)
print(f"mean |difference| of the logits: {(engine(images) - model(images)).abs().mean():.4f}")
start = time.perf_counter()
engine(images)
print(f"a batch of 8: {1000 * (time.perf_counter() - start):.1f} ms on {engine.name}")
