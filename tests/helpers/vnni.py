"""Tests that expect exact 8-bit products of an engine, which saturate without VNNI (swin_quant.backends.saturation)."""

import pytest

from swin_quant.backends.saturation import saturates

exact_int8 = pytest.mark.skipif(
    any(map(saturates, ("onnxruntime", "openvino"))),
    reason="products of 8-bit weights saturate in an engine on this CPU: test_saturation has that",
)
