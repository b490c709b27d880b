"""Find the policy that keeps the loss within a budget at the least latency, by measuring both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag, Group
from swin_quant.cli.output import put
from swin_quant.quant.names import SEARCHED_ON

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.quant.search import Budget
    from swin_quant.score.options import EngineOptions
    from swin_quant.tasks.search import PolicySearch

HELP = "Find the policy that keeps the loss within a budget at the least latency, by measuring both; writes it as YAML."
EXAMPLES = """examples:
  swin-quant search out/my_calib.pth --data-path imagenet --engine openvino --max-drop 0.1 --output out
  swin-quant search out/my_calib.pth --data-path data --engine onnxruntime --min-sqnr 35 --batch 8 --output out
  swin-quant export out/my_calib.pth --for openvino --policy out/my_auto_openvino.yaml --output out   (what it found)

A search that was cut off goes on. The drop is expected from the float model's own probabilities where the two disagree:
no labels are needed. It counts with two standard errors, and twice on training pictures, which a network is surer of
than of others. Exit code 1 says that the budget cannot be met; the best policy that was found is written even so."""


@dataclass(frozen=True)
class BudgetOptions:
    """Limits on a policy's loss and latency."""

    max_drop: Annotated[float | None, Flag("expected drop of top-1 accuracy", "POINTS")] = None
    min_agreement: Annotated[float | None, Flag("top-1 agreement with float", "PERCENT")] = None
    min_sqnr: Annotated[float | None, Flag("SQNR of the logits", "DB")] = None
    max_ms: Annotated[float | None, Flag("latency of a batch on the engine", "MS")] = None

    def loss(self) -> Budget:
        """The limits on the loss. UsageError for one that no policy keeps, or that every policy keeps."""
        from swin_quant.quant.search import Budget

        return Budget(self.max_drop, self.min_agreement, self.min_sqnr)


@dataclass(frozen=True)
class TimingOptions:
    """How policies are timed on an engine."""

    threads: Annotated[int | None, Flag("threads of the engine (default: its own choice)", "N")] = None
    float_type: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Flag("type of what is not int8, where there is a choice (default float32; GPUs float16)"),
    ] = None
    rounds: Annotated[int | None, Flag("rounds of timing (default 5)", "N")] = None
    seconds: Annotated[float | None, Flag("seconds of a round (default 0.5)", "S")] = None

    def engine(self, world: World) -> EngineOptions:
        from swin_quant.score.options import EngineOptions

        return EngineOptions(threads=self.threads, float_type=self.float_type, device=world.device.type)

    def measuring(self) -> dict[str, Any]:
        """Rounds and seconds, of what was given."""
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

    checkpoint: Annotated[str | None, Flag("calibrated checkpoint", "CHECKPOINT", or_flag=True)] = None
    engine: Annotated[str, Flag("what latency is measured on; fastertransformer: which of its modes, without", "NAME")]
    model: Annotated[shared.ModelOptions, Group("model")] = field(default_factory=shared.ModelOptions)
    budget: Annotated[BudgetOptions, Group("budget")] = field(default_factory=BudgetOptions)
    data: Annotated[MeasuredOptions, Group("pictures")] = field(default_factory=MeasuredOptions)
    policy: Annotated[shared.PolicyOptions, Group("policy: which nodes are quantized, and how")] = field(
        default_factory=shared.PolicyOptions
    )
    timing: Annotated[TimingOptions, Group("timing")] = field(default_factory=TimingOptions)
    run: Annotated[shared.RunOptions, Group("run")] = field(default_factory=shared.RunOptions)
    output: shared.Output = None
    json: shared.Json = None


OPTIONS = SearchOptions


def search_of(options: SearchOptions, checkpoint: str, cfg: CfgNode, world: World) -> PolicySearch:
    """The search that options ask for, of a checkpoint with that config. UsageError for what cannot be searched."""
    from swin_quant.tasks.measuring import Measuring
    from swin_quant.tasks.search import PolicySearch
    from swin_quant.tasks.sensitivity import Sampling

    data, policies = options.data, options.policy.policies()
    if len(policies) > 1:
        raise UsageError("--policy: the layers of one policy are switched")
    of = Measuring(
        cfg,
        checkpoint,
        options.engine,
        shared.output_dir(options.output, cfg),
        policies[0] if policies else None,
        1 if data.batch is None else data.batch,
        Sampling(data.pictures, data.split, cfg.SEED + 1, max_unreadable=data.max_unreadable),
        options.timing.engine(world),
        **options.timing.measuring(),
    )
    return PolicySearch(of, options.budget.loss(), options.budget.max_ms)


def run(options: SearchOptions, world: World) -> None:
    from swin_quant.report.costs import search_json, search_table
    from swin_quant.report.table import print_table
    from swin_quant.tasks.search import search

    shared.one_process(world, "search")
    if not (checkpoint := shared.found(options.checkpoint)):
        raise UsageError("nothing to search for: name a calibrated checkpoint")
    cfg = shared.config_of(checkpoint, options.model, options.data, options.run, OUTPUT=options.output)
    asked = search_of(options, checkpoint, cfg, world)
    result = search(asked)
    if options.json:
        put(options.json, search_json(result))
    if options.json != "-":
        print_table(search_table(result, asked.limits, f"{asked.of.engine}, batch {asked.of.batch}"))
    if not result.met:
        raise SwinQuantError(f"the budget cannot be met ({asked.limits}): the best that was found is {result.file}")
