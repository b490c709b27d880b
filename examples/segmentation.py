"""A backbone in int8 under a float head: which digit does each pixel belong to?

Pictures are mosaics of four handwritten digits. A small Swin and a head of one convolution are trained together, then
the backbone is calibrated on mosaics of several sizes, and trained further in few bits with its first stage frozen. The
head stays float. Mosaics of several sizes are scored, not all of them square.

python examples/segmentation.py 600
"""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import swin_quant as sq
from swin_quant.base.files import configs_dir
from swin_quant.config import load_config
from swin_quant.data.sources import DigitsPictures
from swin_quant.models import build_model
from swin_quant.quant.policy import dequantize, quantize
from swin_quant.train.optim import freeze_stages

BACKGROUND, CLASSES = 10, 11
steps = int(sys.argv[1])
torch.manual_seed(0)


def digits(split):
    pictures = DigitsPictures(split)
    levels = torch.tensor(np.stack([np.asarray(pictures.open(index)) for index in range(len(pictures))]))
    return levels / 255, torch.tensor(pictures.labels)


def mosaics(split, count, height=32, width=32, seed=0):
    """Pictures [N, 3, H, W], four digits each, and the class of every pixel [N, H, W]."""
    levels, labels = split
    chosen = torch.randint(len(levels), (count, 2, 2), generator=torch.Generator().manual_seed(seed))
    size = height // 2, width // 2
    parts = F.interpolate(levels[chosen].view(-1, 1, 8, 8), size=size, mode="bilinear").view(count, 2, 2, *size)
    picture = parts.permute(0, 1, 3, 2, 4).reshape(count, height, width)
    label = labels[chosen].view(count, 2, 2, 1, 1).expand_as(parts).permute(0, 1, 3, 2, 4).reshape(picture.shape)
    images = ((picture - 0.3) / 0.35)[:, None].repeat(1, 3, 1, 1)
    return images, torch.where(picture > 0.25, label, BACKGROUND)


class Head(nn.Module):
    """Maps of all stages, resized to the picture, and one convolution over them."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, CLASSES, 3, padding=1)

    def forward(self, maps, size):
        largest = maps[0].shape[-2:]
        same = [F.interpolate(x, size=largest, mode="bilinear", align_corners=False) for x in maps]
        return F.interpolate(self.conv(torch.cat(same, 1)), size=size, mode="bilinear", align_corners=False)


def train(backbone, head, pictures, count, lr):
    parts = [parameter for module in (backbone, head) for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parts, lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, count)
    backbone.train()
    for step in range(count):
        images, labels = mosaics(pictures, 16, seed=1000 + step)
        loss = F.cross_entropy(head(backbone(images), images.shape[-2:]), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    backbone.eval()


@torch.inference_mode()
def score(backbone, head, batches):
    """Mean intersection over union of the classes, and the share of right pixels, in percent."""
    table = torch.zeros(CLASSES, CLASSES)
    for images, labels in batches:
        answers = head(backbone(images), images.shape[-2:]).argmax(1)
        table += torch.bincount((labels * CLASSES + answers).flatten(), minlength=CLASSES**2).view(CLASSES, CLASSES)
    right = table.diag()
    return 100 * (right / (table.sum(0) + table.sum(1) - right).clamp(min=1)).mean(), 100 * right.sum() / table.sum()


train_split, val_split = digits("train"), digits("val")
keys = {"MODEL.OUTPUT_KIND": "features", "MODEL.SWIN.DEPTHS": [2, 2], "MODEL.SWIN.NUM_HEADS": [1, 2]}
backbone = build_model(load_config(configs_dir() / "demo" / "swin_digits.yaml", overrides=keys))
head = Head(32 + 64)
train(backbone, head, train_split, steps, 3e-3)

sizes = [(32, 32), (32, 48), (40, 32)]
held_out = [mosaics(val_split, 64, *size, seed=7) for size in sizes]
print(f"{'backbone':34}mIoU   pixels   (head in float, pictures of {' '.join(f'{h}x{w}' for h, w in sizes)})")


def say(name, network):
    iou, right = score(network, head, held_out)
    print(f"{name:34}{iou:5.1f} % {right:5.1f} %", flush=True)


say("float32", backbone)
mixed = [mosaics(train_split, 4, *size, seed=number)[0] for number, size in enumerate(sizes * 3)]
few = sq.policy("cpu").bits("role:gemm_weight", 3).bits("role:activation", 4)
for name, policy in {"int8 (policy cpu)": "cpu", "weights 3 bits, activations 4": few}.items():
    dequantize(backbone)
    sq.calibrate(backbone, mixed, policy, passes=[])
    quantize(backbone)
    say(name, backbone)

freeze_stages(backbone, 1)
head.requires_grad_(False)
train(backbone, head, train_split, max(1, steps // 4), 3e-4)
say("the same after QAT, stage 0 frozen", backbone)
