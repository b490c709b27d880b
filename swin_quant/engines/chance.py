"""Whether a model only guesses: before its figures are believed, or hours go into training it."""

import math

from swin_quant.base.progress import log

_NOT_TOLD = 0.01  # of guesses, at least so large a share is as good
_SURE = 1e-4  # of middling models, at most so large a share is as bad


def is_guessing(right: int, pictures: int, classes: int) -> bool:
    """Whether so many answers of `pictures` being right is no better than guessing among `classes`, in pictures enough
    that a model halfway between guessing and perfection would hardly ever do as badly (binomial tests)."""
    chance = 1 / classes
    return 1 - _at_most(right - 1, pictures, chance) > _NOT_TOLD and _at_most(right, pictures, (1 + chance) / 2) < _SURE


def warn_of_guessing(acc1: float, pictures: int, classes: int) -> None:
    """Say so of a float model whose top-1 accuracy is `acc1` percent, and what the causes usually are."""
    right = round(acc1 * pictures / 100)
    if classes > 1 and is_guessing(right, pictures, classes):
        log.warning(
            "float32 is right about %d of %d pictures: guessing among %d classes does as well. Usual causes: the data "
            "number the classes in another order than the model (docs/data.md, Class names); pictures are prepared "
            "otherwise than in its training (DATA.MEAN, DATA.STD, TEST.CROP); the head is a new one",
            right, pictures, classes,
        )  # fmt: skip


def _at_most(right: int, pictures: int, chance: float) -> float:
    """The binomial distribution: how probable so many or fewer are."""
    more = pictures + 1
    return math.fsum(
        math.exp(
            math.lgamma(more) - math.lgamma(n + 1) - math.lgamma(more - n)
            + n * math.log(chance) + (pictures - n) * math.log1p(-chance)
        )
        for n in range(right + 1)
    )  # fmt: skip
