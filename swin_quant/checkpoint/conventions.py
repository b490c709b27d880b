"""How publishers name the parts of a Swin: one entry each. Everything here is compared with Microsoft's names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Publisher:
    """How a publisher names the parts of a Swin.

    Attributes:
        block: a key of every block, with places for its stage and its number there.
        embedding, norm: keys of every model; a backbone has no final norm.
        renames: pattern in a key -> its replacement under Microsoft's names; applied in this order, wherever found.
    """

    name: str
    block: str
    embedding: str
    norm: str = ""
    renames: tuple[tuple[str, str], ...] = ()

    @property
    def first(self) -> str:
        return self.block.format(0, 0)

    def keys(self, state: Mapping[str, Any], root: str) -> list[str]:
        """The keys that a model under `root` must have: the first block of each stage, the last, embedding and norm.

        The last stage is the deepest that any key names, or that the width of the final norm tells.
        """
        before, between, _ = self.block.split("{}")
        pattern = re.compile(rf"{re.escape(root + before)}(\d{{1,2}}){re.escape(between)}(\d{{1,4}})\.", re.ASCII)
        stages = {0: 0}
        for match in filter(None, map(pattern.match, state)):
            stages[int(match[1])] = max(stages.get(int(match[1]), 0), int(match[2]))
        deepest = max(stages)
        narrow, wide = (getattr(state.get(root + key), "shape", ()) for key in (self.embedding, self.norm))
        if narrow and wide and wide[0] > narrow[0] > 0:
            deepest = max(deepest, (wide[0] // narrow[0]).bit_length() - 1)
        blocks = [self.block.format(stage, 0) for stage in range(deepest + 1)]
        last = self.block.format(deepest, stages.get(deepest, 0))
        return [root + key for key in dict.fromkeys(filter(None, [*blocks, last, self.embedding, self.norm]))]


_TRANSFORMERS_NAMES = (
    (r"^swin(v2)?\.", ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.norm\.", "patch_embed.norm."),
    (r"^embeddings\.position_embeddings$", "absolute_pos_embed"),
    (r"^encoder\.layers\.", "layers."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.attention\.((self\.)?query|q_proj)\.", ".attn.q."),
    (r"\.attention\.((self\.)?key|k_proj)\.", ".attn.k."),
    (r"\.attention\.((self\.)?value|v_proj)\.", ".attn.v."),
    (r"\.attention\.(self|relative_position_bias)\.", ".attn."),
    (r"\.attn\.continuous_position_bias_mlp\.", ".attn.cpb_mlp."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(\.blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
)
MICROSOFT = Publisher("Microsoft", "layers.{}.blocks.{}.norm1.weight", "patch_embed.proj.weight", "norm.weight")
TIMM_FEATURES = Publisher(
    "timm (features_only)",
    "layers_{}.blocks.{}.norm1.weight",
    "patch_embed.proj.weight",
    renames=((r"^layers_(\d+)\.", r"layers.\1."),),
)
TRANSFORMERS, TRANSFORMERS_V2, TRANSFORMERS_BODY = (
    Publisher(
        "transformers",
        f"{prefix}encoder.layers.{{}}.blocks.{{}}.layernorm_before.weight",
        f"{prefix}embeddings.patch_embeddings.projection.weight",
        f"{prefix}layernorm.weight",
        _TRANSFORMERS_NAMES,
    )
    for prefix in ("swin.", "swinv2.", "")
)
OPENMMLAB = Publisher(
    "OpenMMLab",
    "stages.{}.blocks.{}.norm1.weight",
    "patch_embed.projection.weight",
    renames=(
        (r"^patch_embed\.projection\.", "patch_embed.proj."),
        (r"^stages\.", "layers."),
        (r"\.attn\.w_msa\.", ".attn."),
        (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
        (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
    ),
)
PUBLISHERS = (MICROSOFT, TIMM_FEATURES, TRANSFORMERS, TRANSFORMERS_V2, TRANSFORMERS_BODY, OPENMMLAB)
