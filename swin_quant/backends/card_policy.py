"""Applies the policy of a run card to a model before its export."""

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cards.card import RunCard
from swin_quant.models.classifier import Classifier
from swin_quant.quant.policy import apply_policy, enabled_nodes, policy_from_dict
from swin_quant.quant.quantizer import named_nodes
from swin_quant.quant.setting import Setting


def apply_card_policy(model: Classifier, card: RunCard, precision: str) -> str:
    """Apply the card's policy and return its name; with precision float, turn every node off and return "float".

    SwinQuantError for a card without a policy, UsageError for a policy that quantizes no node.
    """
    for node in named_nodes(model).values():
        node.setting = Setting()
    if precision == "float":
        return precision
    if card.policy is None:
        raise SwinQuantError(f"{card.name}: its run card names no policy: calibrate it with `swin-quant calibrate`")
    apply_policy(model, policy_from_dict(card.policy, f"the run card of {card.name}"))
    if not enabled_nodes(model):
        raise UsageError(f"{card.name}: its policy quantizes no node: export it with precision float")
    return str(card.policy["name"])
