"""Pictures that the quantized model sees otherwise than its float original, those first that it is farthest off on."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from yacs.config import CfgNode

from swin_quant.cards.card import RunCard
from swin_quant.cards.records import ORIGINAL, PTQ
from swin_quant.config import from_dict
from swin_quant.data.class_names import is_numbers
from swin_quant.data.imagenet import english_of
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.loading import load_for_scoring
from swin_quant.report.page.data import Disagreement, Seen
from swin_quant.score.baseline import engines_beside
from swin_quant.score.run_engines import infer
from swin_quant.score.top_classes import class_names, top_classes
from swin_quant.verbs.evaluate import compared

MOST = 24  # on the page
SIDE = 96  # pixels of a thumbnail


@dataclass(frozen=True)
class Comparison:
    """How many pictures were looked at, how many float names otherwise, under which policy, and the worst of those."""

    pictures: int
    otherwise: int
    policy: str
    found: Sequence[Disagreement]


def disagreements(
    card: RunCard, checkpoint: Path, opened: Callable[[CfgNode], Pictures], count: int
) -> Comparison | None:
    """Of `count` pictures spread evenly; None where there is no policy, or what QAT or a pass started from is missing.

    `opened`: the pictures, for the config of the card.
    """
    cfg = from_dict(card.config, card.name)
    subject = load_for_scoring(cfg, str(checkpoint))
    _, baseline = compared(subject, cfg)
    engines = engines_beside(subject.model, torch.device("cpu"), None, subject.policies[:1], baseline)
    first = [label for label, engine in engines.items() if engine.precision == "float32" and engine.policy is None]
    beside = PTQ if card.is_qat else None  # what QAT started from is no answer to what QAT made of it
    last = [label for label, engine in engines.items() if engine.policy and (not beside or engine.weights != beside)]
    if not last or not first or engines[first[0]].weights not in (None, ORIGINAL):
        return None
    pair = {label: engines[label] for label in (first[0], last[-1])}
    pictures, classes = opened(cfg), cfg.MODEL.NUM_CLASSES
    preprocess = Preprocess.from_dict(card.preprocess)
    seen = infer(pair, pictures, preprocess, classes, count=count)
    before, after = (seen.logits[label] for label in pair)
    other = (before.argmax(1) != after.argmax(1)).nonzero().flatten()
    far = divergence(before[other], after[other])
    worst = other[far.argsort(descending=True, stable=True)][:MOST].tolist()
    names = class_names(classes, None, card.class_names or pictures.class_names)
    own = names if is_numbers(pictures.class_names) else pictures.class_names
    index = {name: number for number, name in enumerate(pictures.names)}
    found = [
        Disagreement(
            picture=seen.names[at],
            label=english_of(own[label]) if 0 <= (label := int(seen.labels[at])) < len(own) else "no label",
            thumbnail=thumbnail(pictures.read(index[seen.names[at]], preprocess.upright)),
            float_sees=_seen(before[at], names),
            quantized_sees=_seen(after[at], names),
            kl=float(divergence(before[at : at + 1], after[at : at + 1])),
        )
        for at in worst
    ]
    return Comparison(len(seen.names), len(other), subject.policies[0].name, found)


def divergence(before: Tensor, after: Tensor) -> Tensor:
    """Kullback-Leibler divergence in nats of softmax(`after`) from softmax(`before`), [N]."""
    p, q = before.double().log_softmax(1), after.double().log_softmax(1)
    return (p.exp() * (p - q)).sum(1)


def thumbnail(picture: Image.Image) -> str:
    """A JPEG of at most SIDE pixels a side, in base64."""
    small = picture.copy()
    small.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    return base64.b64encode(buffer.getvalue()).decode()


def _seen(logits: Tensor, names: Sequence[str]) -> Seen:
    (best,) = top_classes(logits[None], names)
    return Seen([guess.name for guess in best], [100 * guess.probability for guess in best])
