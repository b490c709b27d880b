"""Find the policy that keeps the loss within a budget at the least latency, by measuring both; writes it as YAML."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from swin_quant.arguments import checked
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import update
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag, Rare
from swin_quant.cli.output import Printed, print_verdicts, tell
from swin_quant.quant import AUTO, SEARCHED_ON
from swin_quant.report.table import ReportTable
from swin_quant.score.options import EngineOptions

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.checkpoint import Checkpoint
    from swin_quant.data.picture_set import Source
    from swin_quant.model import Model
    from swin_quant.quant.policy import Policy
    from swin_quant.quant.search import Budget, SearchResult, TriedPolicy
    from swin_quant.report.verdict import DeployVerdict
    from swin_quant.verbs.policy_costs import PolicyCosts
    from swin_quant.verbs.search_settings import SearchSettings

EXAMPLES = """examples:
  swin-quant search out/my_calib.pth --data-path imagenet --engine openvino --max-drop 0.1 --output out
  swin-quant search out/my_calib.pth --data-path data --engine onnxruntime --min-sqnr 35 --batch 8 --output out
  swin-quant export out/my_calib.pth --for openvino --policy out/my_auto_openvino.yaml --output out   (what it found)

A search that was cut off goes on. No labels are needed: the drop is estimated from the float model's probabilities
where the two disagree, with two standard errors added, and doubled on training pictures, where a network is too sure.
Exit code 1 says that the budget cannot be met; the best policy that was found is written all the same."""

MAX_DROP = 0.1  # points that --policy auto may lose, where no budget is given


@dataclass(frozen=True)
class BudgetOptions:
    """Limits on a policy's loss and latency."""

    TITLE = "budget"
    max_drop: Annotated[float | None, Flag("expected drop of top-1 accuracy", "POINTS")] = None
    min_agreement: Annotated[float | None, Rare("top-1 agreement with float", "PERCENT")] = None
    min_sqnr: Annotated[float | None, Rare("SQNR of the logits", "DB")] = None
    max_ms: Annotated[float | None, Flag("latency of a batch on the engine", "MS")] = None

    def need_policy_auto(self, policy: object) -> None:
        """UsageError for a limit beside a policy that is not searched for."""
        if self != BudgetOptions() and policy not in (AUTO, (AUTO,)):
            raise UsageError(f"a budget needs ‹policy› {AUTO}, which searches for a policy that keeps it")

    @property
    def or_default(self) -> BudgetOptions:
        """These limits; without any, a drop of MAX_DROP."""
        return BudgetOptions(max_drop=MAX_DROP) if self == BudgetOptions() else self

    def loss(self) -> Budget:
        """The limits on the loss. UsageError for one that no policy keeps, or that every policy keeps."""
        from swin_quant.quant.search import Budget

        return Budget(self.max_drop, self.min_agreement, self.min_sqnr)


@dataclass(frozen=True)
class TimingOptions:
    """How policies are timed on an engine."""

    TITLE = "timing"
    threads: Annotated[int | None, Rare("threads of the engine (default: its own choice)", "N")] = None
    float_type: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Rare("type of float layers (default float32; GPUs float16)"),
    ] = None
    rounds: Annotated[int | None, Rare("rounds of timing (default 5)", "N")] = None
    seconds: Annotated[float | None, Rare("seconds of a round (default 0.5)", "S")] = None

    def engine(self, world: World) -> EngineOptions:
        return EngineOptions(threads=self.threads, float_type=self.float_type, device=world.device.type)

    def measuring(self) -> dict[str, Any]:
        """Rounds and seconds, where they were given."""
        return {key: value for key in ("rounds", "seconds") if (value := getattr(self, key)) is not None}


@dataclass(frozen=True)
class MeasuredOptions(shared.LoadingOptions):
    """The pictures on which losses are measured, and the batch that is timed."""

    batch: Annotated[int | None, Flag("pictures of a batch that is timed (default 1)", "N")] = None
    pictures: Annotated[int, Flag("how many", "N")] = SEARCHED_ON
    split: Annotated[str, Flag("pictures to draw them from")] = "train"

    def keys(self) -> dict[str, Any]:
        return {key: value for key, value in super().keys().items() if key != "DATA.BATCH_SIZE"}


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Which checkpoint a policy is searched for, on which engine, and within which budget."""

    checkpoint: shared.Calibrated = None
    engine: Annotated[str, Flag("engine that is timed; fastertransformer: which of its modes, without latency", "NAME")]
    model: shared.ModelOptions = shared.ModelOptions()
    budget: BudgetOptions = BudgetOptions()
    data: MeasuredOptions = MeasuredOptions()
    policy: shared.PolicyOptions = shared.PolicyOptions()
    timing: TimingOptions = TimingOptions()
    run: shared.RunOptions = shared.RunOptions()
    output: shared.Output = None
    json: shared.Json = None


@dataclass(frozen=True)
class Search(Printed):
    """The result of a search; false where the budget cannot be met. Printed, it is the table of `swin-quant search`."""

    settings: SearchSettings
    result: SearchResult

    @property
    def policy(self) -> Policy:
        """The fastest within the budget, or the best there was; `file` says why each of its layers stays float."""
        return self.result.policy

    @property
    def file(self) -> Path:
        """The policy's YAML."""
        return self.result.file

    @property
    def tried(self) -> tuple[TriedPolicy, ...]:
        """All measured policies, the fastest first: loss, and milliseconds of a batch (None where no latency is)."""
        return self.result.candidates

    @property
    def front(self) -> tuple[TriedPolicy, ...]:
        """The Pareto front: no other policy is both as fast and as near to float."""
        return tuple(one for one in self.tried if one.on_front)

    def __bool__(self) -> bool:
        return self.result.met

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.verdict}"

    def _repr_html_(self) -> str:
        return super()._repr_html_() + self.verdict._repr_html_()

    @property
    def verdict(self) -> DeployVerdict:
        """The policy to deploy, its cost and its gain, and the command that exports it."""
        from swin_quant.report.verdict import of_search

        one = self.settings
        return of_search(
            self.result, one.checkpoint, one.engine, one.options.float_type or one.backend.float_form, one.limits
        )

    def tables(self) -> list[ReportTable[TriedPolicy]]:
        from swin_quant.report.nodes import search_table

        settings = self.settings
        return [search_table(self.result, settings.limits, f"{settings.engine}, batch {settings.batch}")]


@checked
def search(
    model: Model | str | Path,
    pictures: Source,
    engine: str = "openvino",
    folder: str | Path = "out",
    policy: str | Policy | None = None,
    *,
    max_drop: float | None = None,
    min_agreement: float | None = None,
    min_sqnr: float | None = None,
    max_ms: float | None = None,
    batch: int = 1,
    threads: int | None = None,
    float_type: str | None = None,
    device: str = "cpu",
    rounds: int = 5,
    seconds: float = 0.5,
) -> Search:
    """Find the policy that keeps a budget at the least latency on `engine`, as `swin-quant search` does, and apply it.

    The layers of `policy` are switched, None: the engine's best. `max_drop`: points of top-1 expected to be lost,
    `min_agreement`: percent, `min_sqnr`: dB, `max_ms`: milliseconds of a `batch`. `pictures` need no labels; from a
    place on disk 1,024 are drawn, unless it says how many, with its seed + 1: another draw than the one that
    calibrates, though both may hold some pictures. On training pictures, and on pictures of no named split, the drop
    counts twice. The policy, its reasons and all measurements lie in `folder`, where a search that was cut off goes on;
    a model that is in no file yet is saved there first. Where the budget cannot be met, the model keeps its policy,
    with a warning. UsageError for a model that is not calibrated, and for an engine whose latency cannot be measured
    here; for "fastertransformer" the mode is found that keeps the budget and leaves the fewest nodes float, without
    latency.
    """
    from swin_quant.checkpoint.ranges import check_bits
    from swin_quant.data.picture_set import PictureSet, source_of
    from swin_quant.exported import model_of
    from swin_quant.quant.policy import load_policy
    from swin_quant.quant.search import Budget
    from swin_quant.verbs.export import file_of, refuse_changed
    from swin_quant.verbs.policy_costs import PolicyCosts
    from swin_quant.verbs.search_settings import SearchedNetwork, SearchPictures, SearchSettings

    model, source = model_of(model), source_of(pictures)
    network = model.network
    model.need_calibrated()
    refuse_changed(model)
    card = model.card
    searched = SearchedNetwork.of_config(model.config) if card.config else SearchedNetwork.of_wrapped(network, card)
    base, budget = load_policy(policy) if policy else None, Budget(max_drop, min_agreement, min_sqnr)
    options = EngineOptions(threads=threads, float_type=float_type, device=device)
    how = (base, budget, max_ms, batch, options, rounds, seconds)
    settings = SearchSettings(searched, "", engine, Path(folder), *how)  # refuses wrong options before any work
    check_bits(model.module, card, [settings.start], model.name)
    if isinstance(source, PictureSet):
        shown: PictureSet | SearchPictures = source.of_split("train")
    else:
        shown = SearchPictures.of_batches(source, model.prepared)
    file = file_of(model, ensure_writable_dir(folder))
    settings = replace(settings, checkpoint=str(file), pictures=shown)
    result = find_and_keep(PolicyCosts(settings, deepcopy(model)))
    _keep(model, settings, result)
    return Search(settings, result)


def _keep(model: Model, settings: SearchSettings, result: SearchResult) -> None:
    """Apply the policy that was found, and put the search into the model's card; a warning where no budget is kept."""
    from swin_quant.quant.policy import apply_policy
    from swin_quant.verbs.policy_search import search_record

    model.card = model.card.with_search(search_record(settings, result))
    if result.met:
        apply_policy(model.module, result.policy)
        model.card = replace(model.card, policy=result.policy.to_dict())
    else:
        log.warning("%s; the model keeps its policy", settings.unmet(result.file))


def settings_of(options: SearchOptions, checkpoint: Checkpoint, cfg: CfgNode, world: World) -> SearchSettings:
    """The search that options ask for, of a checkpoint with that config. UsageError for impossible options."""
    from swin_quant.data.picture_set import PictureSet
    from swin_quant.verbs.search_settings import SearchedNetwork, SearchSettings

    data = options.data
    how = {"count": data.pictures, "max_unreadable": data.max_unreadable, "cache_mode": "no"}
    return SearchSettings(
        SearchedNetwork.of_config(cfg),
        str(checkpoint),
        options.engine,
        shared.output_dir(options.output, cfg),
        options.policy.one(),
        options.budget.loss(),
        options.budget.max_ms,
        1 if data.batch is None else data.batch,
        options.timing.engine(world),
        pictures=PictureSet.of_config(cfg, data.split, **how),
        **options.timing.measuring(),
    )


def costs_of(settings: SearchSettings, checkpoint: Checkpoint) -> PolicyCosts:
    """Load the checkpoint, to measure its policies."""
    from swin_quant.base.distributed import world_on
    from swin_quant.loading import load_for_scoring
    from swin_quant.verbs.policy_costs import PolicyCosts

    world = world_on(settings.options.device)
    return PolicyCosts(settings, load_for_scoring(settings.network.cfg, checkpoint, [settings.start], world)[0])


def find_and_keep(measured: PolicyCosts) -> SearchResult:
    """Search, go on where an earlier search was cut off, and keep the result in the run card, if there is one."""
    from swin_quant.verbs.policy_search import find_policy, search_record

    result, subject = find_policy(measured), measured.subject
    if subject.card_file:
        record = search_record(measured.settings, result)
        update(subject.card_file, subject.card, lambda card: card.with_search(record))
    return result


def run(options: SearchOptions, world: World) -> None:
    from swin_quant.report.nodes import search_data

    shared.one_process(world, "search")
    measured = _loaded(options, world)
    settings, result = measured.settings, find_and_keep(measured)
    found = Search(settings, result)

    def show() -> None:
        found.show()
        print_verdicts([found.verdict])

    tell(options.json, show, search_data(result) | {"verdicts": [found.verdict.to_dict()]})
    if not result.met:
        raise SwinQuantError(settings.unmet(result.file))


def _loaded(options: SearchOptions, world: World) -> PolicyCosts:
    """The checkpoint as the options say; the weights that were read are dropped with it."""
    from swin_quant.checkpoint import open_checkpoint

    if not options.checkpoint:
        raise UsageError("nothing to search for: name a calibrated checkpoint")
    checkpoint = open_checkpoint(options.checkpoint)
    cfg = shared.config_of(checkpoint, options.model, options.data, options.run, OUTPUT=options.output)
    return costs_of(settings_of(options, checkpoint, cfg, world), checkpoint)
