"""Run a FasterTransformer export by emulating its INT8 kernels: no such GPU is needed.

Between the emulated blocks the residual stream can be read; inside a block there are only FasterTransformer's integers.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from swin_quant.backends.artifact import Artifact, Details, get_policy_name
from swin_quant.backends.fastertransformer.emulator import Emulator
from swin_quant.backends.fastertransformer.manifest import Stored, read_export
from swin_quant.base.errors import UsageError
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions

NAME = "FasterTransformer (emulated)"


def load(artifact: Artifact, options: EngineOptions = EngineOptions()) -> Engine:
    """An engine from the exported files alone. Attention is fused or not as on the target GPU.

    UsageError for a float export, and for a float type other than float16; SwinQuantError for a changed or
    contradictory file.
    """
    if options.float_type not in (None, "float16"):
        raise UsageError(
            f"‹float_type› {options.float_type}: FasterTransformer's INT8 kernels keep the rest in float16"
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("‹device› cuda: torch finds no GPU here")
    stored = read_export(artifact)
    if not stored.case.form.int8:
        raise UsageError(
            f"{artifact.file}: is a {stored.case.form.kind} export, and the emulator is of the INT8 kernels: evaluate "
            "its checkpoint instead"
        )
    if options.threads:
        torch.set_num_threads(options.threads)
    emulator = Emulator(stored, device=options.device)
    return Engine(
        name=NAME,
        precision="int8",
        policy=get_policy_name(artifact),
        run=emulator,
        max_batch=stored.manifest["arguments"]["max_batch"],
        details=Details(
            {
                "sm": stored.case.form.sm,
                "int8_mode": stored.case.int8_mode,
                "attention": "fused" if emulator.fused else "unfused",
                "float_type": "float16",
            },
            partial(_gemms, stored),
        ),
        device=options.device,
    )


def _gemms(stored: Stored) -> dict[str, str]:
    """Maps each matrix product to the type in which it runs."""
    linears = {slot.name.removesuffix(".weight"): "int8" for slot in stored.entries if slot.container}
    blocks = [name.removesuffix("qkv") for name in linears if name.endswith("qkv")]
    products = {f"{at}{product}": "int8" for at in blocks for product in ("q k", "a v")}
    return {"patch_embed.proj": "float16", **linears, **products, "head": "float32"}


def inside(artifact: Artifact, options: EngineOptions) -> Callable[[Tensor], dict[str, Tensor]]:
    """Maps images [B, 3, S, S] to the residual stream after each part, float16, by the part's name."""
    emulator = load(artifact, options).run

    def run(images: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        emulator.features(images, found.__setitem__)  # type: ignore[attr-defined] # an Emulator
        return found

    return run
