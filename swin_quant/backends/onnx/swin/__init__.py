"""Swin V1 and V2 as exported: attention in the one shape that engines fuse, tokens in the order of windows."""

from swin_quant.backends.onnx.rewriting import Rewriter
from swin_quant.backends.onnx.swin import attention_branch_operator, attention_operator, merging_operator, mlp_operator
from swin_quant.backends.onnx.swin.blocks import SwinNetwork
from swin_quant.backends.onnx.swin.half import halve
from swin_quant.backends.onnx.swin.restore import restored
from swin_quant.backends.onnx.swin.rewrites import REWRITES

REWRITER = Rewriter(
    REWRITES,
    SwinNetwork,
    builds_on="fusible-attention",
    constants=frozenset({"one-constant"}),
    unfused=frozenset({"windows-apart"}),
    for_half=frozenset({"fusible-attention", "window-order"}),
    plugins={
        "attention_branch": attention_branch_operator.as_operator,
        "attention": attention_operator.as_operator,
        "mlp": mlp_operator.as_operator,
        "patch_merging": merging_operator.as_operator,
    },
    halve=halve,
    stem="patch_embed.proj",
    restore=restored,
)
