"""Measure what each node costs: the loss with only it quantized, and with all but it; nothing is changed."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from torch import Tensor, nn

from swin_quant.arguments import checked
from swin_quant.base.arguments import Fields
from swin_quant.base.distributed import one_process
from swin_quant.base.errors import UsageError, listed
from swin_quant.base.files import finite
from swin_quant.base.progress import log
from swin_quant.cards.card import update
from swin_quant.cards.records import GroupRecord, SensitivityRecord
from swin_quant.checkpoint.ranges import check_bits
from swin_quant.config.outputs import FEATURES, need_logits
from swin_quant.data.loader import DrawnBatches, default_workers
from swin_quant.data.picture_set import PictureSet, Source, batches, resolve_source
from swin_quant.data.sampling import digest
from swin_quant.exported import open_model
from swin_quant.loading import ModelFile
from swin_quant.model import Model
from swin_quant.models.classifier import Architecture
from swin_quant.models.registry import blocks_or_units, list_stages
from swin_quant.policies import Policies, PolicyChoice, one_policy
from swin_quant.quant import sensitivity as measuring
from swin_quant.quant.outputs import has_classes
from swin_quant.quant.policy import apply_policy
from swin_quant.report.nodes import Costs

EXAMPLES = """swin-quant sensitivity out/my_calib.pth --data-path imagenet
swin-quant sensitivity out/my_calib.pth --data-path data --policy qdq --kind layer --top 20
swin-quant sensitivity out/my_calib.pth --data-path imagenet --kind profile --json depth.json"""
COUNT, TOP, BATCH = 64, 8, 16  # a larger batch gains nothing, and the outputs of all blocks are kept in memory
Kind = Literal["node", "layer", "block", "stage", "role", "profile"]


class Sample(NamedTuple):
    """Pictures that losses are measured on, without labels.

    `batches`: images [B, channels, S, S]; `sha256`: the hash of the pictures' names, None for tensors, which have none;
    `split`: "" where nobody said which.
    """

    batches: list[Tensor]
    sha256: str | None
    split: str


def read_sample(model: Model, pictures: Source | None, usual: int) -> Sample:
    """Read the pictures that losses are measured on: another draw than the one that calibrates.

    Args:
        model: The model that takes them.
        pictures: A place on disk, from whose training pictures `usual` are drawn unless it says how many, with its
            seed + 1; or batches, all of which are taken.
        usual: The number of pictures.
    """

    pictures = resolve_source(pictures, model.given)
    if not isinstance(pictures, PictureSet):
        return Sample([batch.images for batch in batches(pictures, False, model.prepared)], None, "")
    pictures = pictures.with_default_split("train")
    opened = pictures.open()
    count = min(usual, len(opened)) if pictures.count is None else pictures.count
    size = min(pictures.batch or BATCH, BATCH)
    asked = count, (pictures.seed or 0) + 1, size, pictures.max_unreadable or 0.0
    drawn = DrawnBatches(opened, model.preprocess, *asked, workers=default_workers(pictures.workers or 0, 1, count))
    read = [batch.images for batch in drawn if len(batch.labels)]
    if lost := drawn.unreadable():
        log.warning("%d pictures are unreadable, others are taken where there are more: %s", len(lost), listed(lost))
    return Sample(read, digest(drawn.names()), pictures.split or "")


@checked
def sensitivity(
    model: Annotated[Model | nn.Module | str | Path | ModelFile, Fields(ModelFile, "model", ("checkpoint",))],
    pictures: Annotated[Source | None, Fields(PictureSet, "pictures")] = None,
    policy: Annotated[Policies, Fields(PolicyChoice, "policy: which nodes are quantized, and how")] = None,
    *,
    kind: tuple[Kind, ...] = (),
    top: int = TOP,
) -> Costs:
    """Measure the loss with only a node quantized, and with all but it, for every node and group of nodes.

    The logits are compared with the float model's. The column `off wins` is what SQNR gains by leaving a group float:
    begin there where accuracy drops (--off, or `disable` in a policy). The result goes into the run card as well.

    Args:
        model: A calibrated model; one that QAT trained is compared with its own weights, nodes off.
        pictures: They need no labels. From a place on disk 64 are drawn, unless it says how many, with its seed + 1:
            another draw than the one that calibrates, though both may hold some pictures.
        policy: Default: the model's own.
        kind: groups to show, or the SQNR of each block's output (default: all)
        top: rows of each kind, those that cost most; 0: all

    Returns:
        The costs, which print as a table.

    Raises:
        UsageError: The model has no policy, or gives no logits.
        SwinQuantError: An enabled node has no range.
    """
    one_process("sensitivity")
    asked = one_policy(policy)
    file = model if isinstance(model, ModelFile) else None
    model = file.load([asked] if asked else [], any_bits=True) if file else open_model(model)
    module, before = model.module, model.card
    if not has_classes(module):
        need_logits(getattr(module, "output_kind", FEATURES), "sensitivity")
    chosen = asked or model.policy
    if chosen is None:
        raise UsageError(f"{model.name}: has no policy: name one, or calibrate it first")
    if model.is_calibrated and not file:
        check_bits(module, model.card, [chosen], model.name)
    sample = read_sample(model, pictures, COUNT)
    apply_policy(module, chosen)
    known = isinstance(getattr(module, "architecture", None), Architecture)  # a model of the user's own has no stages
    blocks, stages = blocks_or_units(module), list(list_stages(module)) if known else []
    found = measuring.sensitivity(module, sample.batches, blocks, stages, model.original)
    groups = []
    for one in found.groups:
        alone, without = one.alone.record(), one.without.record()
        groups.append(GroupRecord(kind=one.kind, name=one.name, nodes=len(one.nodes), alone=alone, without=without))
    record: SensitivityRecord = finite(
        SensitivityRecord(
            policy=chosen.name,
            policy_sha256=chosen.sha256,
            pictures=found.pictures,
            pictures_sha256=sample.sha256,
            overall=found.overall.record(),
            groups=groups,
            profile=dict(found.profile),
            forwards=found.forwards,
        )
    )
    model.card = replace(model.card, sensitivity=record)
    if file and model.card_file:
        update(model.card_file, before, lambda now: replace(now, sensitivity=record))
        log.info("run card: %s", model.card_file)
    return Costs(record, kind, top or None)
