"""A model of your own, of our layers, calibrated and scored from tensors: no file, no config.

python examples/own_model.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import swin_quant as sq
from swin_quant.quant.layer import QuantLinear

torch.manual_seed(0)
images = torch.randn(512, 3, 8, 8)
labels = (images.mean((2, 3)) @ torch.randn(3, 4)).argmax(1)  # the classes to learn
batches = DataLoader(TensorDataset(images, labels), batch_size=64)
model = nn.Sequential(nn.Flatten(), QuantLinear(192, 32), nn.GELU(), QuantLinear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for _ in range(10):
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
quantized = sq.calibrate(model, batches, sq.policy("float").on("role:gemm_input", "role:gemm_weight"))
print(sq.evaluate(quantized, batches, half="none"))
