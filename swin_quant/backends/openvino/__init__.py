"""OpenVINO on the CPU."""

from swin_quant.backends.backend import ONNX_TOLERANCES, Backend, OnnxTarget, Saturation, onnx_target
from swin_quant.base.extras import installing

DOMAIN = "swin_quant"  # of our operators' nodes
# Operator -> its node's name (plugins/openvino/extension.cpp), in the order in which they take what they can
COMPILED = {
    "attention_branch": "AttentionBranch",
    "map_branch": "MapBranch",
    "token_branch": "TokenBranch",
    "attention": "Attention",
    "mlp": "Mlp",
    "patch_merging": "PatchMerging",
    "patch_embedding": "PatchEmbedding",
}
BACKEND = Backend(
    name="openvino",
    exports=onnx_target(
        OnnxTarget(
            "openvino",
            int4=True,
            reshaped=True,
            channels_last=True,
            compiled=tuple(f"{operator}={DOMAIN}::{node}" for operator, node in COMPILED.items()),
            are_compiled="swin_quant.backends.openvino.operators:are_faster_here",
            tuned=(
                ("mlp",),
                ("token_branch", "mlp"),
                ("attention",),
                ("attention", "mlp"),
                ("attention_branch", "mlp"),
                ("attention_branch", "mlp", "patch_merging"),
                ("attention_branch", "mlp", "patch_merging", "patch_embedding"),
                ("map_branch", "mlp"),
                ("map_branch", "mlp", "patch_merging", "patch_embedding"),
            ),
        ),
        ("cpu", "qdq", "cpu-operators", "qdq-unsigned"),
        ("swin-quant verify {file} --data-path {data}",),
        ("cpu-operators", "swin_quant.backends.openvino.operators:are_default"),
    ),
    writes="ONNX with Q/DQ pairs; each branch of a block is a compiled operator, or nodes with attention in float",
    runs_on="OpenVINO",
    runs=("onnx",),
    load="swin_quant.backends.openvino.engine:load",
    inside="swin_quant.backends.openvino.engine:inside",
    products="swin_quant.backends.openvino.engine:products",
    needs=("openvino", installing("openvino")),
    home="cpu",
    graph_per_shape=True,
    tolerances=ONNX_TOLERANCES,
    float_types="swin_quant.backends.openvino.engine:float_types",
    saturation=Saturation(
        limits=("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
        exact_operators="swin_quant.backends.openvino.operators:run_exact_products",
        all_compiled="swin_quant.backends.openvino.operators:are_all_compiled",
    ),
)
