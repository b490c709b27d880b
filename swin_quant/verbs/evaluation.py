"""How models and artifacts are scored, artifacts of one checkpoint in one pass, the float model first; the results."""

import contextlib
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from yacs.config import CfgNode

from swin_quant import exported
from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import function
from swin_quant.backends.registry import engine_named
from swin_quant.base.distributed import World, this_world
from swin_quant.base.errors import SwinQuantError, UsageError, one_line
from swin_quant.base.files import compute_sha256, ensure_writable_dir, one_at_a_time
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard, update, with_results
from swin_quant.cards.lineage import find_original
from swin_quant.cards.records import Result, sha256_in
from swin_quant.config.outputs import LOGITS, count_classes, say
from swin_quant.config.sides import sides
from swin_quant.data.picture_set import PictureSet, batches
from swin_quant.loading import giving, load_for_scoring, open_baseline
from swin_quant.model import Model
from swin_quant.quant.outputs import has_classes
from swin_quant.quant.policy import Policy, load_policy
from swin_quant.quant.watch import eval_mode
from swin_quant.report.accuracy import AccuracyTable
from swin_quant.report.table import NARROW, html_facts, print_text, screen_width
from swin_quant.report.verdict import DeployVerdict
from swin_quant.score import baseline as baselines
from swin_quant.score.baseline import Baseline, engines_beside
from swin_quant.score.engine import HALF_TYPES, Engine, half_type
from swin_quant.score.options import EngineOptions
from swin_quant.score.run_engines import FeatureScore, compare_engines, largest_batch
from swin_quant.score.scoring import score_engines
from swin_quant.verbs.export_target import ExportTarget
from swin_quant.verbs.timing import Latency, compare_latency

BATCH = {"cpu": 8, "cuda": 32}  # pictures at a time: latencies are of batches as in deployment


@dataclass(frozen=True)
class Evaluation:
    """Results on one list of pictures, the float model's first; printed, it is the accuracy-delta table.

    A model without logits has no `results`: its `outputs` are compared with float32's. Without accuracy, `outputs` are
    latencies. One artifact has a `verdict`; several have a card each in `cards`.
    """

    results: tuple[Result, ...]
    card: RunCard
    outputs: tuple[FeatureScore, ...] | tuple[Latency, ...] = ()
    verdict: DeployVerdict | None = None
    cards: tuple[RunCard, ...] = ()
    model: Model | None = None
    before: RunCard | None = None  # the model's card before it was scored

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def float32(self) -> Result | None:
        """The result of the float model that the user had; None where the model was not found."""
        return next((result for result in self.results if result.precision == "float32"), None)

    @property
    def quantized(self) -> Result | None:
        """The result of the first quantized engine."""
        return next((result for result in self.results if result.policy), None)

    @property
    def _table(self) -> AccuracyTable:
        return AccuracyTable.from_cards(self.cards or [self.card])

    def save_in(self, folder: Path, world: World) -> None:
        """Keep the results of a checkpoint: in its run card, else in a new card in `folder`."""
        if self.model is None or self.before is None or self.outputs or not world.is_main:
            return
        path = self.model.card_file or ensure_writable_dir(folder) / f"{self.name}_eval.json"
        if self.model.card_file:
            self.model.card = update(path, self.before, lambda card: with_results(card, self.results))
        else:
            with one_at_a_time(path.parent):
                card, earlier = self.before, self.before.read(path) if path.exists() else self.before
                origins = ((earlier.source, card.source), (earlier.checkpoint, card.checkpoint))
                if earlier.preprocess == card.preprocess and all(sha256_in(a) == sha256_in(b) for a, b in origins):
                    card = replace(card, results=earlier.results)  # of the same weights
                self.model.card = with_results(card, self.results)
                self.model.card.write(path)
        log.info("run card: %s", path)

    def show(self) -> None:
        """Print the table as wide as the terminal, and the verdict."""
        if self.outputs:
            print(self)
        elif self.results:
            self._table.show()
        if self.verdict:
            print_text("\n" + self.verdict.text(screen_width(NARROW)))

    def to_json(self) -> Any:
        """The table as data, with the verdict."""
        if self.outputs:
            return [asdict(score) for score in self.outputs]
        told = {"verdicts": [self.verdict.to_dict()]} if self.verdict else {}
        return self._table.as_data() | told

    def __str__(self) -> str:
        table = [self._table.text("terminal")] if self.results else []
        return "\n".join(map(str, [*self.outputs, *table, *([self.verdict] if self.verdict else [])]))

    def _repr_html_(self) -> str:
        if self.outputs:
            return html_facts(self.card.name, {score.subject: score.figures for score in self.outputs})
        table = self._table.html() if self.results else ""
        return table + (self.verdict._repr_html_() if self.verdict else "")


@dataclass(frozen=True)
class Evaluated:
    """A result that holds an evaluation, and is shown as it."""

    evaluation: Evaluation

    def show(self) -> None:
        """Print the table as wide as the terminal, and the verdict."""
        self.evaluation.show()

    def to_json(self) -> Any:
        """The table as data, with the verdict."""
        return self.evaluation.to_json()

    def __str__(self) -> str:
        return str(self.evaluation)

    def _repr_html_(self) -> str:
        return self.evaluation._repr_html_()


def score_model(
    model: Model,
    pictures: PictureSet | Iterable[Any],
    policies: Sequence[Policy],
    world: World,
    half: str = "auto",
    baseline: Baseline | None = None,
) -> Evaluation:
    """Score a model for float32, half precision and each policy; the results go into its card in memory.

    Its nodes must be calibrated for the policies. `baseline`: what `open_baseline` found. Every rank scores its share,
    and all return the same.
    """
    engines = engines_beside(model.module, world.device, half_type(half, world.device), policies, baseline)
    with eval_mode(model.module):
        if not has_classes(model.module):
            names: Sequence[str] = getattr(model.module, "output_names", ())
            return Evaluation((), model.card, tuple(compare_engines(engines, pictures, model.prepared, names, world)))
        classes = None
        with contextlib.suppress(UsageError):  # it need not say how many
            classes = model.classes
        results = score_engines(engines, pictures, model.prepared, classes, model.class_names, world)
    scored = replace(model.card, results=[])
    for result in results.values():
        model.card, scored = model.card.with_result(result), scored.with_result(result)
    return Evaluation(tuple(results.values()), scored)


Found = tuple[Result, ...] | tuple[Latency, ...]


@dataclass(frozen=True)
class Scoring:
    """How artifacts are scored: on `engines` (None: all installed), beside the half-precision baseline `half`.

    `checkpoint`, `original`: the exported one, and the float one that it came from, where they are not found.
    `own_float` scores the float form of the same weights on the engine, too, since int8 replaces it, in place of
    torch's half precision if `half` is auto. `origin`: the model of a wrapped module, which no file can build.
    `timed`: the size of a batch of noise that is timed in place of scoring pictures.
    """

    pictures: PictureSet | Iterable[Any]
    engines: Sequence[str] | None = None
    options: EngineOptions = EngineOptions()
    half: str = "auto"
    checkpoint: str | None = None
    original: str | None = None
    own_float: bool = False
    origin: Model | None = None
    timed: int | None = None


class PreparedArtifact(NamedTuple):
    """An artifact with what it is scored by. `folders` are searched for the float checkpoint."""

    artifact: Artifact
    engines: list[str]
    cfg: CfgNode
    checkpoint: Path | None
    folders: list[Path]


def score_artifacts(artifacts: Sequence[Artifact], scoring: Scoring) -> list[Found]:
    """The results of each artifact, its baseline's first; where engines are timed alone, the latencies of all artifacts
    of a checkpoint, with the first of these. Nothing is written. Artifacts of one checkpoint and preprocessing are
    scored in one pass with one float baseline; without its checkpoint one has no delta, and a warning says so. What can
    be refused is refused before a picture is read."""
    groups: dict[tuple[Any, ...], list[PreparedArtifact]] = {}
    engines = [exported.list_engine_names(artifact, scoring.engines) for artifact in artifacts]
    for artifact, names in zip(artifacts, engines, strict=True):
        cfg = exported.read_config(artifact, {"DATA.DATA_PATH": "", "DATA.ZIP_MODE": False})  # no folder of here
        if scoring.timed is None and cfg.MODEL.OUTPUT_KIND != LOGITS:
            given = say(cfg.MODEL.OUTPUT_KIND)
            raise UsageError(f"{artifact.file}: gives {given}, no logits: use `verify`, or ‹no_accuracy› to time it")
        if scoring.timed is not None and artifact.card.wrapped and "inputs" in artifact.card.wrapped:
            raise UsageError(f"{artifact.file}: takes several inputs: time `sq.artifact(FILE).load()` in your own loop")
        checkpoint = exported.find_checkpoint(artifact, scoring.checkpoint)
        folders = [*exported.list_search_folders(artifact), *([checkpoint.parent] if checkpoint else [])]
        if scoring.original:
            find_original(artifact.card, folders, scoring.original)  # refuse before anything is scored
        weights = compute_sha256(checkpoint) if checkpoint else artifact.file
        if scoring.timed is None and isinstance(scoring.pictures, Sequence):
            next(batches(scoring.pictures[:1], True, exported.prepared_by(artifact), count_classes(cfg)), None)
        prepared = PreparedArtifact(artifact, names, cfg, checkpoint, folders)
        groups.setdefault((weights, exported.prepared_by(artifact).preprocess), []).append(prepared)
    scored: dict[Path, Found] = {}
    for group in groups.values():
        scored |= _score_group(group, scoring, this_world())
    return [scored[artifact.file] for artifact in artifacts]


def _score_group(group: Sequence[PreparedArtifact], scoring: Scoring, world: World) -> dict[Path, Found]:
    first, cfg = group[0], group[0].cfg
    loaded = {one.artifact.file: exported.load_engines(one.artifact, one.engines, scoring.options) for one in group}
    pictures, fixed = scoring.pictures, scoring.timed
    if isinstance(pictures, PictureSet):
        pictures = pictures.settled(cfg)
        every = {key: engine for engines in loaded.values() for key, engine in engines.items()}
        batch = largest_batch(pictures.batch or BATCH[world.device.type], every)
        if fixed is None and scoring.own_float and pictures.has(batch * world.size):  # or it would be filled up
            fixed = batch
    with TemporaryDirectory(prefix="swin-quant-float-") as folder:
        floats = _load_own_floats(group, scoring, world, Path(folder), fixed)
        half = half_type("none" if floats and scoring.half == "auto" else scoring.half, world.device)
        baseline = _load_baseline(group, scoring, half, world)
        engines = dict(baseline)
        engines.update(one for some in (*floats.values(), *loaded.values()) for one in some.items())
        if scoring.timed is not None:
            wrapped = first.artifact.card.wrapped
            shape = tuple(wrapped["shape"]) if wrapped else (3, *sides(cfg.DATA.IMG_SIZE))
            latencies = compare_latency(engines, scoring.timed, shape)
            return {one.artifact.file: latencies if one is first else () for one in group}
        how = exported.prepared_by(first.artifact), count_classes(cfg), first.artifact.card.class_names
        results = score_engines(engines, pictures, *how, world)
    scored: dict[Path, Found] = {}
    for one in group:
        card, file = one.artifact.card, one.artifact.file
        measured, weights = [results[key] for key in baseline], baselines.whose_weights(card)
        for name, key in zip(one.engines, loaded[file], strict=True):
            device = exported.on_its_device(name, scoring.options).device
            keys = (*floats.get(name, ()), key) if card.policy else (key,)
            measured += [replace(results[each], device=device, weights=weights) for each in keys]
        scored[file] = tuple(measured)
    return scored


def _load_baseline(
    group: Sequence[PreparedArtifact], scoring: Scoring, half: str | None, world: World
) -> dict[str, Engine]:
    """float32 first, then half; nothing where no float model is found."""
    first, card, origin = group[0], group[0].artifact.card, scoring.origin
    baseline, why = None, exported.NEEDS_MODULE
    if card.wrapped and origin:
        baseline = open_baseline(origin, [], world)
    elif card.wrapped is None:
        why = exported.no_checkpoint(first.artifact)
        baseline = baselines.find_baseline(card, first.folders, first.cfg, [], world, scoring.original)
    if baseline is None and (origin or (first.checkpoint and card.wrapped is None)):
        quantized = next((one for one in group if one.artifact.card.policy), first)
        model, _ = exported.load_origin(quantized.artifact, first.cfg, first.checkpoint, world, origin)
        return engines_beside(model.module, world.device, half, [], None)
    if baseline is None and card.wrapped is None and (file := find_original(card, first.folders, scoring.original)):
        baseline = Baseline(baselines.load_original(first.cfg, file, world)[0])
    if baseline is None:
        log.warning("%s: no float model stands beside it: %s", first.artifact.file, why)
        return {}
    return baselines.load_original_engines(baseline, world.device, half)


def _load_own_floats(
    group: Sequence[PreparedArtifact], scoring: Scoring, world: World, folder: Path, batch: int | None
) -> dict[str, dict[str, Engine]]:
    """Engine name -> the float forms of the same weights on it, where none is scored. `batch`: that of most batches."""
    first, options = group[0], scoring.options
    is_built = scoring.origin is not None or first.artifact.card.wrapped is None
    is_wanted = scoring.own_float and any(one.artifact.card.policy for one in group)
    if first.checkpoint is None or not is_built or not is_wanted:
        return {}
    found: dict[str, dict[str, Engine]] = {}
    given = {name for one in group if not one.artifact.card.policy for name in one.engines}
    for name in dict.fromkeys(name for one in group for name in one.engines if name not in given):
        backend, device = engine_named(name), engine_named(name).home or world.device.type
        if not backend.runs_its_export or backend.only_quantized or not backend.is_fast_on(device):
            continue
        try:
            fixed = {"batch": batch} if backend.graph_per_shape else {}
            target, plain = ExportTarget.parse(name, "float", fixed), load_policy("float")
            if scoring.origin is None:
                model, _ = load_for_scoring(first.cfg, first.checkpoint, [plain])
                module, card = model.network, giving(model.card, first.cfg)
            else:  # a wrapped module, which no file can build
                module, card = deepcopy(scoring.origin.network).cpu().eval(), scoring.origin.card
            artifact = target.write(module, card, first.checkpoint, folder / name, plain)
            offered = function(backend.float_types)() if backend.float_types else []
            half = [kind for kind in HALF_TYPES if kind in offered and kind == half_type("auto", world.device)]
            is_slow = half and not options.float_type and scoring.timed is None  # float32, to score
            for kind in dict.fromkeys([*([] if is_slow else [options.float_type]), *half]):
                loaded = exported.load_engines(artifact, [name], replace(options, float_type=kind))
                found.setdefault(name, {}).update((f"{one.label} on {name}", one) for one in loaded.values())
        except (SwinQuantError, RuntimeError) as error:  # by exporters and engines
            log.warning("%s: its own float is not scored: %s", name, one_line(str(error)))
    return found
