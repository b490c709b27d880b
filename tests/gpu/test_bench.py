"""Engines on a GPU are timed by the GPU's work."""

import time

import torch
from torch import nn

from swin_quant.score.engine import Engine, milliseconds, torch_engines


class Busy(nn.Module):
    """Logits of pictures, after queueing `products` products of large matrices."""

    def __init__(self, products: int) -> None:
        super().__init__()
        self.products = products
        self.register_buffer("matrix", torch.randn(2048, 2048))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for _ in range(self.products):
            self.matrix = (self.matrix @ self.matrix).clamp(-1, 1)
        return images.mean((2, 3)) + self.matrix[0, 0]


def busy(products: int, device: str) -> Engine:
    return torch_engines(Busy(products).to(device), torch.device(device), None)["float32"]


def test_the_time_is_that_of_the_work_not_of_queueing_it(cuda):
    images = torch.zeros(1, 3, 8, 8, device=cuda)
    engine = busy(200, str(cuda))
    with torch.inference_mode():
        engine(images)
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine(images)
        queued = 1000 * (time.perf_counter() - start)
        torch.cuda.synchronize()
        done = 1000 * (time.perf_counter() - start)
        taken = milliseconds(engine, images)
    assert queued < 0.8 * done and 0.5 * done < taken < 2 * done
