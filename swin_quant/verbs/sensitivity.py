"""Measure what each node costs: the loss with only it quantized, and with all but it; nothing is changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from swin_quant.arguments import checked
from swin_quant.base.errors import UsageError, listed
from swin_quant.base.files import finite
from swin_quant.base.progress import log, track
from swin_quant.cards.card import update
from swin_quant.cards.costs import GroupRecord, SensitivityRecord
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag
from swin_quant.cli.output import Printed, tell
from swin_quant.config.outputs import FEATURES, need_logits
from swin_quant.quant import GROUP_KINDS
from swin_quant.report.table import ReportTable, comma_separated, print_text

if TYPE_CHECKING:
    from torch import Tensor, nn

    from swin_quant.base.distributed import World
    from swin_quant.data.picture_set import Source
    from swin_quant.model import Model
    from swin_quant.quant.policy import Policy
    from swin_quant.report.nodes import CostRow

EXAMPLES = """examples:
  swin-quant sensitivity out/my_calib.pth --data-path imagenet                          (policy of its run card)
  swin-quant sensitivity out/my_calib.pth --data-path data --policy qdq --kind layer --top 20
  swin-quant sensitivity out/my_calib.pth --data-path imagenet --format csv > costs.csv
  swin-quant sensitivity out/my_calib.pth --data-path imagenet --kind profile --format csv > depth.csv

The logits are compared with the float model's on pictures without labels. They are another sample than the one that
`calibrate` draws by the same --seed, because ranges and weights suit that one. "off wins" is what SQNR gains by leaving
a group float: begin there where accuracy drops (--off, or `disable` in a policy)."""
PROFILE = "profile"
COUNT, TOP, BATCH = 64, 8, 16  # a larger batch gains nothing, and the outputs of all blocks are kept in memory


@dataclass(frozen=True)
class SampleOfPictures(shared.LoadingOptions):
    """The pictures on which losses are measured."""

    pictures: Annotated[int, Flag("how many", "N")] = COUNT
    split: Annotated[str, Flag("pictures to draw them from")] = "train"


@dataclass(frozen=True)
class SensitivityOptions:
    """The checkpoint to measure, its pictures, the policy, and the form of the output."""

    checkpoint: shared.Calibrated = None
    model: shared.ModelOptions = shared.ModelOptions()
    data: SampleOfPictures = SampleOfPictures()
    policy: shared.PolicyOptions = shared.PolicyOptions()
    run: shared.RunOptions = shared.RunOptions()
    kind: Annotated[
        tuple[str, ...],
        Flag("groups to show, or the SQNR of each block's output (default: all)", choices=(*GROUP_KINDS, PROFILE)),
    ] = ()
    top: Annotated[int, Flag(f"rows of each kind, those that cost most; 0: all (default {TOP})", "N")] = TOP
    format: Annotated[Literal["table", "csv"], Flag("form of the output")] = "table"
    json: shared.Json = None


@dataclass(frozen=True)
class Costs(Printed):
    """The costs of every node and group; printed, it is the table of `swin-quant sensitivity`."""

    record: SensitivityRecord
    kinds: Sequence[str] = ()  # that are printed; empty: all
    top: int | None = TOP  # rows of each kind

    def rows(self, kind: str = "node") -> list[CostRow]:
        """The groups of a kind (role, stage, block, layer, node), the costliest first."""
        from swin_quant.report.nodes import rows_of

        return rows_of(self.record, [kind])

    def tables(self) -> list[ReportTable[Any]]:
        from swin_quant.report.nodes import profile_table, sensitivity_table

        groups = [kind for kind in self.kinds or GROUP_KINDS if kind != PROFILE]
        has_profile = PROFILE in self.kinds if self.kinds else self.record["profile"]
        tables: list[ReportTable[Any]] = [sensitivity_table(self.record, groups, self.top)] if groups else []
        return [*tables, profile_table(self.record)] if has_profile else tables


class Sample(NamedTuple):
    """Pictures that losses are measured on, without labels.

    `batches`: images [B, channels, S, S]; `sha256`: the hash of the pictures' names, None for tensors, which have none;
    `split`: "" where nobody said which.
    """

    batches: list[Tensor]
    sha256: str | None
    split: str


def read_sample(model: Model, pictures: Source, usual: int) -> Sample:
    """Read the pictures that losses are measured on: another draw than the one that calibrates.

    Args:
        model: The model that takes them.
        pictures: A place on disk, from whose training pictures `usual` are drawn unless it says how many, with its
            seed + 1; or batches, all of which are taken.
        usual: The number of pictures.
    """
    from swin_quant.data.loader import DrawnBatches, default_workers
    from swin_quant.data.picture_set import PictureSet, batches, source_of
    from swin_quant.data.sampling import Sampling, digest

    pictures = source_of(pictures)
    if not isinstance(pictures, PictureSet):
        return Sample([batch.images for batch in batches(pictures, False, model.prepared)], None, "")
    pictures = pictures.of_split("train")
    opened = pictures.open()
    count = min(usual, len(opened)) if pictures.count is None else pictures.count
    size = min(pictures.batch or BATCH, BATCH)
    sampling = Sampling(count, pictures.split or "", pictures.seed + 1, size, pictures.max_unreadable)
    drawn = DrawnBatches(opened, model.preprocess, sampling, workers=default_workers(pictures.workers, 1, count))
    read = [batch.images for _, batch in drawn if len(batch.labels)]
    if lost := drawn.unreadable():
        log.warning("%d pictures are unreadable, others are taken where there are more: %s", len(lost), listed(lost))
    return Sample(read, digest(drawn.names()), sampling.split)


@checked
def sensitivity(model: Model | nn.Module | str | Path, pictures: Source, policy: str | Policy | None = None) -> Costs:
    """Measure the loss with only a node quantized, and with all but it, for every node and group of nodes.

    The result goes into the model's card as well.

    Args:
        model: A calibrated model; one that QAT trained is compared with its own weights, nodes off.
        pictures: They need no labels. From a place on disk 64 are drawn, unless it says how many, with its seed + 1:
            another draw than the one that calibrates, though both may hold some pictures.
        policy: None is the model's own.

    Returns:
        The costs, which print as the table of the command.

    Raises:
        UsageError: the model has no policy, or gives no logits.
        SwinQuantError: an enabled node has no range.
    """
    from swin_quant.checkpoint.ranges import check_bits
    from swin_quant.exported import model_of
    from swin_quant.models.classifier import Architecture
    from swin_quant.models.registry import blocks_or_units, stages_of
    from swin_quant.quant import sensitivity as measuring
    from swin_quant.quant.outputs import has_classes
    from swin_quant.quant.policy import apply_policy, load_policy

    model = model_of(model)
    module = model.module
    if not has_classes(module):
        need_logits(getattr(module, "output_kind", FEATURES), "sensitivity")
    chosen = load_policy(policy) if policy else model.policy
    if chosen is None:
        raise UsageError(f"{model.name}: has no policy: name one, or calibrate the model")
    if model.is_calibrated:
        check_bits(module, model.card, [chosen], model.name)
    sample = read_sample(model, pictures, COUNT)
    apply_policy(module, chosen)
    known = isinstance(getattr(module, "architecture", None), Architecture)  # a model of the user's own has no stages
    blocks, stages = blocks_or_units(module), list(stages_of(module)) if known else []
    started = itertools.count(1)

    def bar(groups: Iterable[int], total: int) -> Iterable[int]:
        return track(groups, f"measuring nodes, batch {next(started)} of {len(sample.batches)}", total, "groups")

    found = measuring.sensitivity(
        module, (one.to(model.device) for one in sample.batches), blocks, stages, bar, model.original
    )
    groups = [
        GroupRecord(
            kind=group.kind,
            name=group.name,
            nodes=len(group.nodes),
            alone=group.alone.record(),
            without=group.without.record(),
        )
        for group in found.groups
    ]
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
    return Costs(record)


def run(options: SensitivityOptions, world: World) -> None:
    """Measure a checkpoint, and write the result to its run card, if there is one."""
    from swin_quant.checkpoint import open_checkpoint
    from swin_quant.data.picture_set import PictureSet
    from swin_quant.loading import load_for_scoring

    shared.one_process(world, "sensitivity")
    is_csv = options.format == "csv"
    if is_csv and PROFILE in options.kind and {PROFILE} != {*options.kind}:
        raise UsageError("--kind profile: CSV has one table: ask for it alone")
    if not options.checkpoint:
        raise UsageError("nothing to measure: name a calibrated checkpoint")
    checkpoint, data = open_checkpoint(options.checkpoint), options.data
    cfg = shared.config_of(checkpoint, options.model, data, options.run)
    policy = options.policy.one()
    how = {"count": data.pictures, "batch": data.batch, "max_unreadable": data.max_unreadable}
    pictures = PictureSet.of_config(cfg, data.split, cache_mode="no", **how)
    need_logits(cfg.MODEL.OUTPUT_KIND, "sensitivity")
    model, policies = load_for_scoring(cfg, checkpoint, [policy] if policy else [], world, any_bits=True)
    if not policies:
        raise UsageError(f"{checkpoint}: is a float checkpoint: calibrate it first")
    before = model.card
    record = sensitivity(model, pictures, policies[0]).record
    if model.card_file:
        update(model.card_file, before, lambda now: replace(now, sensitivity=record))
        log.info("run card: %s", model.card_file)
    found = Costs(record, options.kind, None if is_csv else options.top or None)
    first = found.tables()[0]
    show = partial(print_text, comma_separated(first.columns, first.rows)) if is_csv else found.show
    tell(options.json, show, record)
