"""Find the most probable classes of logits, and the names of classes."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swin_quant.base.errors import UsageError
from swin_quant.base.files import read_lines
from swin_quant.data.imagenet import english_of, wnids_of


@dataclass(frozen=True)
class Guess:
    """A class, its name (or index without one) and its probability, 0 to 1."""

    index: int
    name: str
    probability: float


def top_classes(logits: Tensor, names: Sequence[str], count: int = 5) -> list[list[Guess]]:
    """The `count` most probable classes (all, if there are fewer) of each row of logits [N, classes]; best first."""
    best = logits.double().softmax(1).topk(min(count, logits.shape[1]), dim=1)
    return [
        [Guess(index, names[index], probability) for index, probability in zip(indices, probabilities, strict=True)]
        for indices, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def class_names(classes: int, labels: str | None = None, carried: Sequence[str] = ()) -> list[str]:
    """Names of the classes: from the file `labels`, one a line; else `carried` by a card or artifact, if as many; else
    ImageNet's if it has a set with this number; else numbers.

    UsageError for a file with another number of names, SwinQuantError for one that cannot be read as text.
    """
    if labels is not None:
        names = read_lines(labels, "list of class names")
        if len(names) != classes:
            raise UsageError(f"‹labels› {labels}: has {len(names)} names, the model {classes} classes")
        return names
    named = carried if len(carried) == classes else wnids_of(classes) or range(classes)
    return [english_of(str(name)) for name in named]
