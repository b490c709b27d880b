"""Swin Transformer V1 and V2 with quantizer nodes. Architecture only: no policy, no data, no backend."""

from swin_quant.models.build import build_model

__all__ = ["build_model"]
