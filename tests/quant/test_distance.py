"""The loss between logits: no figures for logits that are not finite."""

import pytest
import torch

from swin_quant.base.errors import SwinQuantError
from swin_quant.quant import check
from swin_quant.quant.distance import distance, make_loss
from swin_quant.score.run_engines import difference

LOGITS = torch.tensor([[1.0, 0.0, -2.0], [0.5, 2.0, 1.0]])


def test_equal_logits_lose_nothing():
    loss = make_loss([distance(LOGITS, LOGITS)])
    assert (loss.sqnr_db, loss.kl, loss.agreement, loss.drop) == (float("inf"), 0.0, 100.0, 0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_logits_are_an_error(value):
    broken = LOGITS.clone()
    broken[1, 1] = value
    for found, expected, whose in ((broken, LOGITS, "quantized"), (LOGITS, broken, "float")):
        with pytest.raises(SwinQuantError, match=f"logits of the {whose} model are not finite"):
            distance(found, expected)
    assert check.agreement_and_sqnr([(broken, LOGITS)])[1] == -float("inf")  # so a pass is taken back
    assert difference(broken, LOGITS)["sqnr_db"] == -float("inf")  # None would mean equal
