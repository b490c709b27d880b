"""The report as a page: run cards by checkpoint, the nodes of its file, pictures that INT8 classifies otherwise."""

import base64
import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import kl_div

from swin_quant.base.errors import SwinQuantError, UsageError, one_line
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import find_recorded_file
from swin_quant.cards.records import ORIGINAL, PTQ
from swin_quant.checkpoint import OpenedCheckpoint, open_checkpoint
from swin_quant.config import from_dict
from swin_quant.data.class_names import get_english_names, is_numbers
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.preprocess import Preprocess
from swin_quant.loading import load_for_scoring, open_baseline
from swin_quant.report.page import page
from swin_quant.report.page.data import Disagreement, PageData, node_summaries
from swin_quant.report.verdict import card_verdict, seen_from
from swin_quant.score.baseline import engines_beside
from swin_quant.score.run_engines import infer
from swin_quant.score.scoring import class_names, top_classes

COMPARED = 256  # pictures, evenly spread
MOST = 24  # pictures on the page
SIDE = 96  # pixels of a thumbnail


def write_page(target: Path, cards: Mapping[Path, RunCard], pictures: PictureSet | None = None) -> None:
    """Write the page of `cards` as one file, with those of the pictures that INT8 classifies otherwise than float."""
    groups: dict[str, dict[Path, RunCard]] = {}  # by checkpoint
    for path, card in cards.items():
        sha = card.checkpoint["sha256"] if card.checkpoint else str(path)
        groups.setdefault(sha, {})[path] = card
    parts = {path: seen_from(target.parent, path).parts for path in cards}
    ends = Counter(part[-length:] for part in parts.values() for length in range(1, len(part) + 1))
    apart = {
        path: "/".join(next((part[-length:] for length in range(1, len(part)) if ends[part[-length:]] == 1), part))
        for path, part in parts.items()
    }
    refused: dict[str, SwinQuantError] = {}
    found = [_checkpoint_data(group, pictures, target.parent, apart, refused) for group in groups.values()]
    if pictures is not None and not any(data.compared for data in found):
        what = "no checkpoint with a policy, and the float model it came from, is beside the cards"
        raise next(iter(refused.values()), UsageError(f"‹data_path›: {what}"))
    for title, error in refused.items():
        log.warning("%s: no pictures on the page: %s", title, error)
    content = page(found).encode()
    atomic_write_bytes(ensure_writable_dir(target.parent) / target.name, content)
    log.info("page: %s, %d kB", target, len(content) // 1000)


def _checkpoint_data(
    cards: Mapping[Path, RunCard],
    pictures: PictureSet | None,
    folder: Path,
    apart: Mapping[Path, str],
    refused: dict[str, SwinQuantError],
) -> PageData:
    """The data of one checkpoint. `cards`: its own card and those of its artifacts; `apart`: the name of each;
    `refused`: gets why `pictures` are none for it."""
    paths = sorted(cards, key=lambda path: cards[path].artifact is not None)
    first, together = cards[paths[0]], list(cards.values())
    verdicts = [verdict for path, card in cards.items() if (verdict := card_verdict(card, path, folder))]
    data = PageData(first.name, {apart[path]: card for path, card in cards.items()}, verdicts=verdicts)
    file = next((file for path in paths if (file := find_recorded_file(cards[path].checkpoint, [path.parent]))), None)
    if file is None:
        return replace(data, missing=f"{first.name}: the checkpoint is not beside the card: its nodes are not shown")
    if first.policy is None:
        return replace(data, missing=f"{first.name}: is a float checkpoint, which has no nodes yet")
    if first.wrapped:
        return replace(data, missing=f"{first.name}: is a wrapped module, which only Python builds: no nodes are shown")
    checkpoint = open_checkpoint(file)
    artifacts = [card for card in together if card.artifact]
    own_first = [first, *together]  # another card of the checkpoint may hold what its own lacks
    calibration = next((one.calibration for one in own_first if one.calibration), None)
    sensitivity = next((one.sensitivity for one in own_first if one.sensitivity), None)
    completed = replace(first, calibration=calibration, sensitivity=sensitivity)
    try:
        data = replace(data, nodes=node_summaries(completed, checkpoint, artifacts))
    except SwinQuantError as error:
        log.warning("nodes are not shown: %s", error)
        return replace(data, missing=f"{first.name}: nodes are not shown: {one_line(str(error))}")
    if pictures is None or first.artifact:
        return data
    try:
        return _with_disagreements(data, first, checkpoint, pictures)
    except SwinQuantError as error:  # such as those of another data set
        refused[apart[paths[0]]] = error
        return data


def _with_disagreements(data: PageData, card: RunCard, checkpoint: OpenedCheckpoint, source: PictureSet) -> PageData:
    """The data, with the pictures that the quantized model classifies otherwise than float, the worst first."""
    cfg = from_dict(card.config, card.name)
    model, policies = load_for_scoring(cfg, checkpoint)
    engines = engines_beside(model.module, torch.device("cpu"), None, policies[:1], open_baseline(model, policies))
    first = [label for label, engine in engines.items() if engine.precision == "float32" and engine.policy is None]
    skipped = PTQ if card.is_qat else None  # a fine-tuned model is not represented by the calibrated one it began with
    last = [key for key, engine in engines.items() if engine.policy and (not skipped or engine.weights != skipped)]
    if not first or not last or engines[first[0]].weights not in (None, ORIGINAL):
        return data
    pair = {label: engines[label] for label in (first[0], last[-1])}
    classes = cfg.MODEL.NUM_CLASSES
    pictures = replace(source.with_default_split("val"), classes=classes).open()
    if is_numbers(card.class_names) and pictures.class_names and not is_numbers(pictures.class_names):
        theirs, ours = one_line(pictures.class_names[0]), one_line(card.class_names[0])
        raise SwinQuantError(f"{source.path}: has classes such as {theirs:.40}, the model such as {ours:.40}")
    preprocess = Preprocess.from_dict(card.preprocess)
    seen = infer(pair, pictures, preprocess, classes, replace(source, count=source.count or COMPARED))
    before, after = (seen.logits[label] for label in pair)
    other = (before.argmax(1) != after.argmax(1)).nonzero().flatten()
    p, q = (logits[other].double().log_softmax(1) for logits in (before, after))
    divergences = kl_div(q, p, reduction="none", log_target=True).sum(1)  # in nats
    order = divergences.argsort(descending=True, stable=True)[:MOST].tolist()
    names = class_names(classes, None, card.class_names or pictures.class_names)
    own = names if is_numbers(pictures.class_names) else pictures.class_names
    index = {name: number for number, name in enumerate(pictures.names)}
    found = []
    for rank in order:
        at, jpeg = int(other[rank]), io.BytesIO()
        small = pictures.read(index[seen.names[at]], preprocess.upright).copy()
        small.thumbnail((SIDE, SIDE))
        small.save(jpeg, "JPEG", quality=85)
        label = int(seen.labels[at])
        found.append(
            Disagreement(
                picture=seen.names[at],
                label=get_english_names(own[label]) if 0 <= label < len(own) else "no label",
                thumbnail=base64.b64encode(jpeg.getvalue()).decode(),
                float_sees=top_classes(before[at][None], names)[0],
                quantized_sees=top_classes(after[at][None], names)[0],
                kl=float(divergences[rank]),
            )
        )
    return replace(data, compared=len(seen.names), otherwise=len(other), policy=policies[0].name, disagreements=found)
