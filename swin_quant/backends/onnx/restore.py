"""What the rewrites of an export moved, put back: tensors of an ONNX file as the trained model has them."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.onnx.rewriting import rewriter_of
from swin_quant.config.load import from_dict
from swin_quant.models.build import build_model

Restore = Callable[[Tensor], Tensor]


def restoring(artifact: Artifact) -> Mapping[str, Restore | None]:
    """Module -> what makes of its tensor that of the trained model; None: there is none, or it means something else.

    Modules that are not named are as they were.
    """
    model = build_model(from_dict(artifact.card.config, str(artifact.file)))
    restore = rewriter_of(model).restore
    if restore:
        return restore(model, frozenset(artifact.record["options"].get("rewrites", ())))
    return dict.fromkeys(holding_activations(model))


def holding_activations(model: nn.Module) -> list[str]:
    """Norms of timm that hold their activation: traced, it runs behind them; by its name in a file it is theirs."""
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    return [name for name, module in norms.items() if any(True for _ in module.children())]
