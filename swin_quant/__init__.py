"""swin-quant: Swin Transformer V1 and V2 from a float checkpoint to INT8 that was measured.

    import swin_quant as sq

    model = sq.load("swin_tiny_patch4_window7_224.pth")
    sq.calibrate(model, "imagenet", sq.policy("qdq").off("layers.3.*"))
    artifact = sq.export(model, "openvino", "out")
    print(sq.evaluate(artifact, "imagenet"))
    logits = artifact.load()("photo.jpg")

Importing it changes nothing in the process; slow modules are imported when they are asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from swin_quant.base import __version__ as __version__

if TYPE_CHECKING:
    from swin_quant.base.cpu import reproducible as reproducible
    from swin_quant.data.picture_set import pictures as pictures
    from swin_quant.exported import Exported as Exported
    from swin_quant.exported import artifact as artifact
    from swin_quant.loading import load as load
    from swin_quant.model import Model as Model
    from swin_quant.policies import policy as policy
    from swin_quant.quant.policy import Policy as Policy
    from swin_quant.report.engines import Alignment as Alignment
    from swin_quant.report.engines import Verification as Verification
    from swin_quant.report.nodes import Search as Search
    from swin_quant.verbs.align import align as align
    from swin_quant.verbs.analyze import analyze as analyze
    from swin_quant.verbs.calibrate import calibrate as calibrate
    from swin_quant.verbs.doctor import doctor as doctor
    from swin_quant.verbs.evaluate import evaluate as evaluate
    from swin_quant.verbs.evaluation import Evaluation as Evaluation
    from swin_quant.verbs.export import export as export
    from swin_quant.verbs.finetune import Finetuned as Finetuned
    from swin_quant.verbs.finetune import finetune as finetune
    from swin_quant.verbs.package import package as package
    from swin_quant.verbs.predict import predict as predict
    from swin_quant.verbs.quantize import Quantized as Quantized
    from swin_quant.verbs.quantize import quantize as quantize
    from swin_quant.verbs.search import search as search
    from swin_quant.verbs.search_costs import Budget as Budget
    from swin_quant.verbs.sensitivity import sensitivity as sensitivity
    from swin_quant.verbs.serve import app as app
    from swin_quant.verbs.verify import verify as verify
    from swin_quant.wrapping import wrap as wrap

_VERBS = "align analyze calibrate doctor evaluate export finetune package predict quantize search sensitivity verify"
_FACE = {  # name -> its module
    **{name: f"swin_quant.verbs.{name}" for name in _VERBS.split()},
    "load": "swin_quant.loading",
    "Model": "swin_quant.model",
    "wrap": "swin_quant.wrapping",
    "artifact": "swin_quant.exported",
    "Exported": "swin_quant.exported",
    "pictures": "swin_quant.data.picture_set",
    "policy": "swin_quant.policies",
    "Policy": "swin_quant.quant.policy",
    "Preprocess": "swin_quant.data.preprocess",
    "Alignment": "swin_quant.report.engines",
    "Budget": "swin_quant.verbs.search_costs",
    "Evaluation": "swin_quant.verbs.evaluation",
    "Finetuned": "swin_quant.verbs.finetune",
    "Quantized": "swin_quant.verbs.quantize",
    "Search": "swin_quant.report.nodes",
    "Verification": "swin_quant.report.engines",
    "app": "swin_quant.verbs.serve",
    "SwinQuantError": "swin_quant.base.errors",
    "UsageError": "swin_quant.base.errors",
    "reproducible": "swin_quant.base.cpu",
}
__all__ = [*_FACE, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_FACE[name])
    found = getattr(module, name)
    if hasattr(found, "__wrapped__") or name.endswith("Error"):
        return found
    from swin_quant.arguments import checked, checked_class  # also for what lies below that module

    if isinstance(found, type):
        return checked_class(found)
    setattr(module, name, checked(found))  # in its place, where pickle looks for it
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FACE})
