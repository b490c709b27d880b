"""Swin V1 and V2 as exported: attention in the one shape that engines fuse, tokens in the order of windows."""

from swin_quant.backends.onnx.network import Rewriter
from swin_quant.backends.onnx.swin.attention_operator import attention_as_operator, branch_as_operator
from swin_quant.backends.onnx.swin.blocks import SwinNetwork
from swin_quant.backends.onnx.swin.half import halve
from swin_quant.backends.onnx.swin.int8_operators import merging_as_operator, mlp_as_operator
from swin_quant.backends.onnx.swin.patch_embedding import embedding_as_operator
from swin_quant.backends.onnx.swin.rewrites import REWRITES, restored

REWRITER = Rewriter(
    REWRITES,
    SwinNetwork,
    builds_on="fusible-attention",
    constants=frozenset({"one-constant"}),
    unfused=frozenset({"windows-apart"}),
    for_half=frozenset({"fusible-attention", "window-order"}),
    plugins={
        "attention_branch": branch_as_operator,
        "attention": attention_as_operator,
        "mlp": mlp_as_operator,
        "patch_merging": merging_as_operator,
        "patch_embedding": embedding_as_operator,
    },
    halve=halve,
    stem="patch_embed.proj",
    restore=restored,
)
