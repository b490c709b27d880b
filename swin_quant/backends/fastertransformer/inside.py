"""Read the residual stream between the emulated blocks; inside a block there are only FasterTransformer's integers."""

from collections.abc import Callable

from torch import Tensor

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.fastertransformer.engine import load
from swin_quant.score.options import EngineOptions


def inside(artifact: Artifact, options: EngineOptions) -> Callable[[Tensor], dict[str, Tensor]]:
    """Maps images [B, 3, S, S] to the residual stream after each part, float16, by the part's name."""
    emulator = load(artifact, options).run

    def run(images: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        emulator.features(images, found.__setitem__)  # type: ignore[attr-defined] # an Emulator
        return found

    return run
