"""Networks with quantizer nodes: Swin V1 and V2, and registered architectures. No policy, no data, no backend."""

from swin_quant.models.registry import build_model

__all__ = ["build_model"]
