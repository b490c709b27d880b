"""From a config to a model with freshly initialised weights and named nodes."""

from yacs.config import CfgNode

from swin_quant.models.classifier import Classifier
from swin_quant.models.registry import architectures
from swin_quant.quant.quantizer import named_nodes


def build_model(cfg: CfgNode) -> Classifier:
    """The model of a checked `cfg` in evaluation mode, every node off."""
    architecture = architectures()[cfg.MODEL.TYPE]
    model = architecture.build(cfg)
    model.architecture = architecture
    named_nodes(model)
    return model.eval()
