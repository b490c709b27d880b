"""What the page shows: run cards put together by the checkpoint that they speak of, and what lies beside them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from yacs.config import CfgNode

from swin_quant.base.errors import SwinQuantError, UsageError, one_line
from swin_quant.base.files import atomic_write_bytes, ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import find
from swin_quant.data.pictures import Pictures
from swin_quant.data.sources import open_pictures
from swin_quant.report.page.data import PageData
from swin_quant.report.page.document import page
from swin_quant.tasks.disagreements import disagreements
from swin_quant.tasks.node_summary import node_summaries

Opened = Callable[[CfgNode], Pictures]


def subjects_of(cards: Mapping[Path, RunCard], opened: Opened | None = None, count: int = 0) -> list[PageData]:
    """A subject for each checkpoint: its nodes where its file is found, `count` pictures where they are given."""
    groups: dict[str, list[Path]] = {}
    for path, card in cards.items():
        sha = card.checkpoint["sha256"] if card.checkpoint else str(path)
        groups.setdefault(sha, []).append(path)
    found = [_subject({path: cards[path] for path in paths}, opened, count) for paths in groups.values()]
    if opened is not None and not any(subject.compared for subject in found):
        raise UsageError(
            "‹data_path›: no checkpoint with a policy, and the float model it came from, is beside the cards"
        )
    return found


def write_page(target: Path, cards: Mapping[Path, RunCard], opened: Opened | None = None, count: int = 0) -> None:
    """The page of `cards`, as one file."""
    content = page(subjects_of(cards, opened, count)).encode()
    atomic_write_bytes(ensure_writable_dir(target.parent) / target.name, content)
    log.info("page: %s, %d kB", target, len(content) // 1000)


def pictures_at(data_path: str, split: str, zip_mode: bool) -> Opened:
    """The pictures of a split, for the config of a card."""

    def opened(cfg: CfgNode) -> Pictures:
        return open_pictures(
            data_path, split, zip_mode=zip_mode, cache_mode="no",
            num_classes=cfg.MODEL.NUM_CLASSES if zip_mode else None,
        )  # fmt: skip

    return opened


def _subject(cards: Mapping[Path, RunCard], opened: Opened | None, count: int) -> PageData:
    paths = sorted(cards, key=lambda path: cards[path].artifact is not None)
    first = cards[paths[0]]
    subject = PageData(first.name, list(cards.values()))
    checkpoint = next((file for path in paths if (file := find(cards[path].checkpoint, [path.parent]))), None)
    if checkpoint is None:
        return replace(subject, missing=f"{first.name}: the checkpoint is not beside the card: its nodes are not shown")
    if first.policy is None:
        return replace(subject, missing=f"{first.name}: is a float checkpoint, which has no nodes yet")
    artifacts = [card for card in cards.values() if card.artifact]
    try:
        subject = replace(subject, nodes=node_summaries(_whole(first, list(cards.values())), checkpoint, artifacts))
    except SwinQuantError as error:
        log.warning("nodes are not shown: %s", error)
        return replace(subject, missing=f"{first.name}: nodes are not shown: {one_line(str(error))}")
    compared = disagreements(first, checkpoint, opened, count) if opened and not first.artifact else None
    if compared is None:
        return subject
    return replace(subject, compared=compared.pictures, otherwise=compared.otherwise, policy=compared.policy,
                   disagreements=compared.found)  # fmt: skip


def _whole(card: RunCard, beside: Sequence[RunCard]) -> RunCard:
    """The card, with what only others of the same checkpoint recorded."""
    calibration = next((one.calibration for one in (card, *beside) if one.calibration), None)
    sensitivity = next((one.sensitivity for one in (card, *beside) if one.sensitivity), None)
    return replace(card, calibration=calibration, sensitivity=sensitivity)
