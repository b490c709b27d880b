"""OpenVINO on the CPU."""

from swin_quant.backends.backend import ONNX_TOLERANCES, Backend, OnnxTarget, Saturation, onnx_target
from swin_quant.base.extras import installing

BACKEND = Backend(
    name="openvino",
    exports=onnx_target(
        OnnxTarget(
            "openvino",
            int4=True,
            compiled=(
                "attention_branch=swin_quant::AttentionBranch",
                "map_branch=swin_quant::MapBranch",
                "attention=swin_quant::Attention",
                "mlp=swin_quant::Mlp",
                "patch_merging=swin_quant::PatchMerging",
                "patch_embedding=swin_quant::PatchEmbedding",
            ),
            are_compiled="swin_quant.backends.openvino.operators:are_faster_here",
            tuned=(
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
        ("swin-quant bench {file} --checkpoint {checkpoint}",),
        ("cpu-operators", "swin_quant.backends.openvino.operators:are_default"),
    ),
    writes="ONNX with Q/DQ pairs, a compiled operator for each branch of a block, or float products of attention",
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
        exact_operators="swin_quant.backends.openvino.operators:run_all_products",
    ),
)
