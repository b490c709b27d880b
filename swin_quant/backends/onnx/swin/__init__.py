"""Swin V1 and V2 as exported: attention in the one shape that engines fuse, tokens in the order of windows."""

from swin_quant.backends.onnx.network import Rewriter
from swin_quant.backends.onnx.swin.attention_operator import ATTENTION, ATTENTION_BRANCH
from swin_quant.backends.onnx.swin.blocks import SwinNetwork
from swin_quant.backends.onnx.swin.half import halve
from swin_quant.backends.onnx.swin.int8_operators import MLP, PATCH_EMBEDDING, PATCH_MERGING
from swin_quant.backends.onnx.swin.rewrites import FOR_NPU, REWRITES, restored

REWRITER = Rewriter(
    REWRITES | FOR_NPU,
    SwinNetwork,
    builds_on="fusible-attention",
    constants=frozenset({"one-constant"}),
    unfused=frozenset({"windows-apart"}),
    for_npu=frozenset(FOR_NPU),
    for_half=frozenset({"fusible-attention", "window-order"}),
    plugins={
        "attention_branch": ATTENTION_BRANCH,
        "attention": ATTENTION,
        "mlp": MLP,
        "patch_merging": PATCH_MERGING,
        "patch_embedding": PATCH_EMBEDDING,
    },
    halve=halve,
    stem="patch_embed.proj",
    restore=restored,
)
