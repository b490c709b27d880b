"""The nodes of a model under a policy, with the ranges of a checkpoint if there is one."""

import torch
from yacs.config import CfgNode

from swin_quant.checkpoint import load_calibrated, load_float, open_checkpoint
from swin_quant.models import build_model
from swin_quant.models.classifier import Classifier
from swin_quant.quant.listing import NodeRow, list_nodes
from swin_quant.quant.policy import Policy, apply_policy, policy_from_dict


def nodes_of(cfg: CfgNode, checkpoint: str | None = None, policy: Policy | None = None) -> list[NodeRow]:
    """Every node of the model that `cfg` describes; `policy` None: that of the checkpoint's run card.

    Those of a float checkpoint have no ranges.
    """
    model = model_of(cfg, checkpoint, policy)
    return list_nodes(model, (1, model.in_chans, cfg.DATA.IMG_SIZE, cfg.DATA.IMG_SIZE))


def model_of(cfg: CfgNode, checkpoint: str | None = None, policy: Policy | None = None) -> Classifier:
    """The model that `cfg` describes, float or calibrated as its checkpoint is; without one, shapes alone."""
    with torch.device("cpu" if checkpoint else "meta"):  # shapes and names need no weights
        model = build_model(cfg)
    subject = open_checkpoint(checkpoint) if checkpoint else None
    card = subject.card if subject else None
    if card and card.policy and policy is None:
        policy = policy_from_dict(card.policy, card.name)
    if policy is not None:
        apply_policy(model, policy)
    if subject:
        (load_calibrated if subject.is_calibrated else load_float)(model, subject)
    return model
