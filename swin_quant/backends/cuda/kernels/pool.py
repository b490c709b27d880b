"""The last norm, and the mean over a picture's tokens: the features that the head is given."""

from torch import Tensor

from swin_quant.backends.cuda.kernels.norms import normed


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, half_steps: bool = False) -> None:
    """x half [B, R, R, C] -> out float32 or half [B, C]; `half_steps` rounds the norm's result to half (FT)."""
    y = normed(x.flatten(1, 2), weight, bias, eps)
    out.copy_((y.to(x.dtype).float() if half_steps else y).mean(1))
