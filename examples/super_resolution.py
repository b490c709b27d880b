"""Super-resolution in int8: a picture of any size in, one of twice the size out, by a small network of Swin blocks.

The network adds details to the bicubic enlargement. It is trained for some steps on crops of `train`, wrapped with
pixels from 0 to 1, calibrated on pictures, and exported for two engines. Large pictures go through it in tiles that
overlap. PSNR and time of each stand beside bicubic's; the first picture of `val` is written in both sizes.

python examples/super_resolution.py imagenet 2000 out

400 steps on 96 pictures of ImageNet, 32 others held out: bicubic 27.95 dB; the network 28.21 dB, in int8 28.18 dB on
OpenVINO and on ONNX Runtime.
"""

import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import swin_quant as sq
from swin_quant.base.compat import import_timm

TILE, OVERLAP, WINDOW, CHANNELS, BATCH = 48, 8, 8, 48, 8
data, steps, folder = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
torch.manual_seed(0)


def swin_block(shift):
    import_timm()  # before timm: a torchvision for GPUs beside a torch for CPUs would break its import
    from timm.models.swin_transformer import SwinTransformerBlock

    return SwinTransformerBlock(CHANNELS, (TILE, TILE), num_heads=3, window_size=WINDOW, shift_size=shift, mlp_ratio=2)


class Details(nn.Module):
    """What the bicubic enlargement lacks: tiles [B, 3, 48, 48] -> [B, 3, 96, 96]."""

    def __init__(self, groups=2):
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.blocks = nn.Sequential(*[swin_block(shift) for _ in range(groups) for shift in (0, WINDOW // 2)])
        self.last = nn.Conv2d(CHANNELS, 3 * 4, 3, padding=1)
        self.enlarge = nn.PixelShuffle(2)

    def forward(self, x):
        shallow = self.first(x - 0.5)
        deep = self.blocks(shallow.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.enlarge(self.last(shallow + deep))


def bicubic(small):
    return F.interpolate(small, scale_factor=2, mode="bicubic", align_corners=False)


def shrunk(large):
    return F.interpolate(large, scale_factor=0.5, mode="bicubic", align_corners=False, antialias=True).clamp(0, 1)


def starts(length):
    """Where tiles begin along a side: they overlap, and the last one ends with the picture."""
    return [*range(0, length - TILE, TILE - OVERLAP), length - TILE]


@torch.inference_mode()
def enlarged(picture, details):
    """A picture [3, H, W] at twice its size. Tiles are averaged where they overlap, less towards their edges."""
    height, width = picture.shape[1:]
    padded = F.pad(picture[None], (0, max(0, TILE - width), 0, max(0, TILE - height)), mode="replicate")
    corners = [(y, x) for y in starts(padded.shape[2]) for x in starts(padded.shape[3])]
    tiles = torch.cat([padded[:, :, y : y + TILE, x : x + TILE] for y, x in corners])
    found = torch.cat([details(part) for part in tiles.split(BATCH)])
    ramp = torch.arange(1, TILE + 1).clamp(max=OVERLAP).repeat_interleave(2).float()
    weight = torch.minimum(ramp, ramp.flip(0))
    weight = weight[:, None] * weight
    total, weights = torch.zeros_like(bicubic(padded)[0]), torch.zeros_like(bicubic(padded)[0, :1])
    for (y, x), tile in zip(corners, found, strict=True):
        place = slice(None), slice(2 * y, 2 * (y + TILE)), slice(2 * x, 2 * (x + TILE))
        total[place] += weight * tile
        weights[place] += weight
    whole = (bicubic(padded)[0] + total / weights)[:, : 2 * height, : 2 * width]
    return whole.clamp(0, 1)


def to_pixels(picture):
    """The pixels of a picture, from 0 to 1, [3, H, W] with even sides; a small one is enlarged to a crop's size."""
    scale = max(1, 2 * TILE / min(picture.size))
    width, height = (2 * round(scale * side / 2) for side in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    return torch.tensor(np.asarray(picture), dtype=torch.float32).permute(2, 0, 1) / 255


def draw(split, count):
    """The pixels of so many pictures of a split, or of all where there are fewer."""
    found = sq.pictures(data, split).open()
    return [to_pixels(found.read(index)) for index in torch.randperm(len(found))[:count].tolist()]


def crops(pictures, count):
    """Random crops [B, 3, 96, 96]."""
    found = []
    for picture in (pictures[i] for i in torch.randint(len(pictures), (count,))):
        y, x = (int(torch.randint(side - 2 * TILE + 1, ())) for side in picture.shape[1:])
        found.append(picture[:, y : y + 2 * TILE, x : x + 2 * TILE])
    return torch.stack(found)


def psnr(found, wanted):
    return -10 * torch.log10((found - wanted).square().mean()).item()


pictures, held_out, module = draw("train", 64), draw("val", 16), Details()
optimizer = torch.optim.AdamW(module.parameters(), 2e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
for step in range(steps):
    large = crops(pictures, 16)
    small = shrunk(large)
    loss = F.l1_loss(bicubic(small) + module(small), large)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 100 == 99:
        print(f"step {step + 1} of {steps}: mean distance {loss.item():.4f}", flush=True)
module.eval()

from_0_to_1 = sq.Preprocess(TILE, True, "bicubic", mean=(0, 0, 0), std=(1, 1, 1), crop_ratio=1.0)
model = sq.wrap(module, TILE, name="details", preprocess=from_0_to_1)
sq.calibrate(model, sq.pictures(data, "train", 32))
networks = {"float32, torch": module, "int8, simulated": model}
for engine in ("openvino", "onnxruntime"):
    networks[f"float32, {engine}"] = sq.export(model, engine, folder, precision="float").load(threads=1)
    networks[f"int8, {engine}"] = sq.export(model, engine, folder).load(threads=1)
ways = {"bicubic": lambda small: bicubic(small[None])[0].clamp(0, 1)}
ways |= {name: partial(enlarged, details=network) for name, network in networks.items()}

smaller = [shrunk(large[None])[0] for large in held_out]
print(f"{'':22}PSNR       ms a picture")
for name, enlarge in ways.items():
    enlarge(smaller[0])  # warm
    start = time.perf_counter()
    results = [enlarge(small) for small in smaller]
    took = (time.perf_counter() - start) / len(held_out)
    print(f"{name:22}{np.mean(list(map(psnr, results, held_out))):5.2f} dB {1000 * took:8.0f}", flush=True)
for name, picture in {"small": smaller[0], "large": results[0]}.items():
    levels = (255 * picture).round().byte().permute(1, 2, 0)
    Image.fromarray(levels.numpy()).save(folder / f"{name}.png")
