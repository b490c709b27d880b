"""What each node and group of nodes costs: from a calibrated checkpoint and pictures to a record in its run card."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn
from yacs.config import CfgNode

from swin_quant.base.distributed import World, gather
from swin_quant.base.errors import UsageError
from swin_quant.base.files import finite
from swin_quant.base.progress import log, track
from swin_quant.cards.card import RunCard
from swin_quant.cards.costs import GroupRecord, LossRecord, SensitivityRecord
from swin_quant.cards.update import update
from swin_quant.config.outputs import need_logits
from swin_quant.data.calibration import calibration_batches
from swin_quant.data.loader import UnreadableLimit, default_workers
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import digest
from swin_quant.data.sources import open_unlabelled
from swin_quant.loading import load_for_scoring
from swin_quant.models.classifier import Architecture
from swin_quant.models.registry import blocks_or_units, stages_of
from swin_quant.quant.distance import Loss
from swin_quant.quant.policy import Policy, apply_policy
from swin_quant.quant.sensitivity import Sensitivity, sensitivity


@dataclass(frozen=True)
class Sampling:
    """The pictures that sensitivity is measured on: `count` of `split`, drawn by `seed`, `batch_size` at a time."""

    count: int = 64
    split: str = "train"
    seed: int = 0
    batch_size: int = 16
    max_unreadable: float = 0.01

    def __post_init__(self) -> None:
        for field, value in (("‹pictures›", self.count), ("‹batch›", self.batch_size)):
            if value < 1:
                raise UsageError(f"{field} {value}: must be at least 1")


def measure_checkpoint(
    cfg: CfgNode,
    checkpoint: str,
    policy: Policy | None,
    sampling: Sampling,
    world: World = World(),
) -> tuple[RunCard, SensitivityRecord]:
    """The checkpoint's run card with what was measured, and that; the card is written by rank 0 if there was one.

    `policy` None is that of the card. A checkpoint that QAT trained is compared with its own weights, nodes off.
    """
    need_logits(cfg, "sensitivity")
    subject = load_for_scoring(cfg, checkpoint, [policy] if policy else [], world)
    if not subject.policies:
        raise UsageError(f"{checkpoint}: is a float checkpoint: calibrate it first")
    pictures = open_unlabelled(cfg, sampling.split)
    preprocess = Preprocess.from_dict(subject.card.preprocess)
    workers = default_workers(cfg.DATA.NUM_WORKERS, world.size, sampling.count)
    record = measure(subject.model, subject.policies[0], pictures, preprocess, sampling, world, workers)
    card = replace(subject.card, sensitivity=record)
    if subject.card_file and world.is_main:
        card = update(subject.card_file, subject.card, lambda now: replace(now, sensitivity=record))
        log.info("run card: %s", subject.card_file)
    return card, record


def measure(
    model: nn.Module,
    policy: Policy,
    pictures: Pictures,
    preprocess: Preprocess,
    sampling: Sampling,
    world: World = World(),
    workers: int = 0,
) -> SensitivityRecord:
    """On a seeded sample of `pictures`, the same on any number of ranks; see `quant.sensitivity`."""
    limit = UnreadableLimit(len(pictures), sampling.max_unreadable)
    size = sampling.batch_size if preprocess.is_square else 1
    numbered = calibration_batches(
        pictures, preprocess, sampling.count, size, sampling.seed, limit, world.rank, world.size, workers
    )
    used: list[tuple[int, list[str]]] = []

    def images() -> Iterator[tuple[int, Tensor]]:
        for number, batch in numbered:
            used.append((number, [pictures.names[index] for index in batch.indices]))
            yield number, batch.images.to(world.device)

    found = measure_batches(model, policy, images())
    names = [name for _, batch in sorted(gather(used)) for name in batch]
    return recorded_as(found, policy, digest(names))


def measure_batches(model: nn.Module, policy: Policy, batches: Iterable[tuple[int, Tensor]]) -> Sensitivity:
    """On (number, images [B, channels, S, S]); the model is left under `policy`, nodes off."""
    apply_policy(model, policy)
    known = isinstance(getattr(model, "architecture", None), Architecture)  # a model of the user's own has no stages
    blocks, stages = blocks_or_units(model), list(stages_of(model)) if known else []

    def numbered() -> Iterator[tuple[int, Tensor]]:
        for done, (number, images) in enumerate(batches, 1):
            told.append(f"measuring nodes, batch {done}")
            yield number, images

    told: list[str] = []
    return sensitivity(model, numbered(), blocks, stages, lambda groups, total: track(groups, told[-1], total))


def recorded_as(found: Sensitivity, policy: Policy, pictures_sha256: str | None) -> SensitivityRecord:
    """For a run card; `pictures_sha256` is of the pictures' names, None where they have none."""
    groups = [
        GroupRecord(
            kind=group.kind,
            name=group.name,
            nodes=len(group.nodes),
            alone=loss_record(group.alone),
            without=loss_record(group.without),
        )
        for group in found.groups
    ]
    record: SensitivityRecord = finite(
        SensitivityRecord(
            policy=policy.name,
            policy_sha256=policy.sha256,
            pictures=found.pictures,
            pictures_sha256=pictures_sha256,
            overall=loss_record(found.overall),
            groups=groups,
            profile=dict(found.profile),
            forwards=found.forwards,
        )
    )
    return record


def loss_record(loss: Loss) -> LossRecord:
    """For a run card."""
    return LossRecord(sqnr_db=loss.sqnr_db, kl=loss.kl, agreement=loss.agreement, drop=loss.drop,
                      drop_error=loss.drop_error)  # fmt: skip
