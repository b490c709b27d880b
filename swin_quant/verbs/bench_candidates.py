"""The candidates of a bench: the user's files, and the float model in torch and on the same engines."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from yacs.config import CfgNode

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import Backend, function
from swin_quant.backends.open_artifact import open_artifact
from swin_quant.backends.registry import artifact_engine, engine_named, torch_engine
from swin_quant.backends.registry import engines as known_engines
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.cards.records import PTQ, QAT
from swin_quant.config import from_dict
from swin_quant.config.outputs import LOGITS, need_logits
from swin_quant.config.sides import sides
from swin_quant.exported import CHECKPOINTS, config_of, find_checkpoint, names_of_engines, on_its_device
from swin_quant.score.baseline import whose_weights
from swin_quant.score.candidate import BenchCandidate
from swin_quant.score.engine import EAGER
from swin_quant.score.options import EngineOptions
from swin_quant.verbs.export_target import export_checkpoint
from swin_quant.verbs.verify import is_quantized

FLOAT32 = "float32"
REFERENCE = f"{EAGER} {FLOAT32}"  # the candidate whose logits are the reference
_CHANGED_WEIGHTS = {QAT: ", QAT weights", PTQ: ", corrected weights"}  # ends the names of float candidates


@dataclass(frozen=True)
class BenchCandidates:
    """Candidates, the reference first; the config and a card of the checkpoint that they were made from."""

    candidates: list[BenchCandidate]
    cfg: CfgNode
    card: RunCard

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        wrapped = self.card.wrapped
        return tuple(wrapped["shape"]) if wrapped else (3, *sides(self.cfg.DATA.IMG_SIZE))

    @property
    def has_classes(self) -> bool:
        return bool(self.cfg.MODEL.OUTPUT_KIND == LOGITS)


@dataclass(frozen=True)
class _Entry:
    """An artifact on an engine."""

    artifact: Artifact
    engine: str

    @property
    def precision(self) -> str:
        return self.artifact.record["precision"]

    @property
    def is_float(self) -> bool:
        return not is_quantized(self.precision)


def bench_candidates(
    paths: Sequence[str],
    engines: Sequence[str] | None,
    float_types: Sequence[str] | None,
    checkpoint: str | None,
    workspace: Path,
    threads: int | None,
    device: str = "cpu",
) -> BenchCandidates:
    """Candidates for artifacts and checkpoints of one model, at `paths`.

    A checkpoint runs on the installed engines of `device` (or on `engines`), exported as `export` does. These files and
    the float baseline of each engine go to `workspace`. `float_types`: the types of layers that are not int8, for
    engines that offer a choice; None: float32, and bfloat16 if this CPU has it. `device`: where torch and the engines
    that offer a choice run; on a GPU torch runs in float16 as well. Artifacts of a wrapped module, which only Python
    builds, are compared with the float ones among them.
    """
    artifacts, checkpoints = _opened(paths)
    options = EngineOptions(threads=threads, device=device)
    if artifacts and artifacts[0].card.wrapped and not checkpoints:
        return _of_wrapped(artifacts, engines, float_types, options)
    origin = _origin(artifacts, checkpoints, checkpoint)
    card = artifacts[0].card if artifacts else RunCard.read(card_path(origin))
    if card.wrapped:
        raise UsageError(f"{card.name}: is a wrapped module, which only Python builds: bench what it exports to")
    cfg = config_of(artifacts[0]) if artifacts else from_dict(card.config, str(card_path(origin)))
    need_logits(cfg.MODEL.OUTPUT_KIND, "bench")
    entries = [_Entry(artifact, name) for artifact in artifacts for name in _engines_of(artifact, engines)]
    for target in (engines or _tried_on(device)) if checkpoints else ():
        if not _is_tried(engine_named(target), device):
            able = [name for name, backend in known_engines().items() if _is_tried(backend, device)]
            raise UsageError(f"‹engine› {target}: a checkpoint is tried on {', '.join(able)}: export it first")
        artifact = export_checkpoint(origin, target, workspace / f"{target}_int8", cfg)[0]
        entries += [_Entry(artifact, name) for name in names_of_engines(artifact, [target])]
    used = list(dict.fromkeys(entry.engine for entry in entries))
    baselines = {}  # the type of each engine's float baseline
    for engine in used:
        backend = engine_named(engine)
        if not has_float_baseline(backend, device):
            continue
        if not any(entry.engine == engine and entry.precision == backend.float_form for entry in entries):
            artifact, _ = export_checkpoint(origin, engine, workspace / f"{engine}_float", cfg, precision="float")
            entries.append(_Entry(artifact, engine))
            baselines[engine] = entries[-1].precision  # the export may choose a wider type
        else:
            baselines[engine] = backend.float_form
    entries.sort(key=lambda entry: (used.index(entry.engine), entry.precision != FLOAT32, not entry.is_float))
    whose = _CHANGED_WEIGHTS.get(whose_weights(card) or "", "")
    candidates = [
        BenchCandidate(
            f"{EAGER} {half or FLOAT32}{whose}",
            partial(torch_engine, str(origin), card.config, device, half),
            origin,
            REFERENCE + whose if half else None,
        )
        for half in (None, *(["float16"] if device == "cuda" else []))
    ]
    for entry in entries:
        baseline = baselines.get(entry.engine)
        own = f"{entry.engine} {baseline}" if baseline else REFERENCE
        candidates += _candidates(entry, float_types, options, own + whose, whose)
    return BenchCandidates(_named_apart(candidates), cfg, card)


def _of_wrapped(
    artifacts: Sequence[Artifact],
    engines: Sequence[str] | None,
    float_types: Sequence[str] | None,
    options: EngineOptions,
) -> BenchCandidates:
    """Candidates for artifacts of a wrapped module; the baseline of each is the float artifact of its engine."""
    card = artifacts[0].card
    if "inputs" in (card.wrapped or {}):
        raise UsageError(f"{artifacts[0].file}: takes several inputs: time `sq.artifact(FILE).load()` in your own loop")
    origins = {record["sha256"] for one in artifacts if (record := one.card.checkpoint or one.card.source)}
    if len(origins) > 1 or not all(one.card.wrapped for one in artifacts):
        raise UsageError("the files must be made from one checkpoint: bench them one at a time")
    entries = [_Entry(artifact, name) for artifact in artifacts for name in _engines_of(artifact, engines)]
    entries.sort(key=lambda entry: (not entry.is_float, entry.precision != FLOAT32))
    baselines = {entry.engine: f"{entry.engine} {entry.precision}" for entry in reversed(entries) if entry.is_float}
    candidates: list[BenchCandidate] = []
    for entry in entries:
        candidates += _candidates(entry, float_types, options, baselines.get(entry.engine), "")
    return BenchCandidates(_named_apart(candidates), config_of(artifacts[0]), card)


def _is_tried(backend: Backend, device: str) -> bool:
    """Whether `bench` exports a checkpoint for an engine: it runs the exported file itself, at full speed."""
    return backend.runs_its_export and backend.is_fast_on(backend.home or device)


def _tried_on(device: str) -> list[str]:
    """The engines that a checkpoint is tried on by default: the installed ones."""
    able = {name: one for name, one in known_engines().items() if _is_tried(one, device) and one.home in (None, device)}
    if not any(one.is_installed for one in able.values()):
        remedies = " or ".join(one.remedy for one in able.values())
        raise UsageError(f"no engine for {device} is installed" + (f": {remedies}" if remedies else ""))
    return [name for name, one in able.items() if one.is_installed]


def has_float_baseline(backend: Backend, device: str) -> bool:
    """Whether a float export runs on the engine at full speed on `device`."""
    return _is_tried(backend, device) and not backend.only_quantized


def _opened(paths: Sequence[str]) -> tuple[list[Artifact], list[str]]:
    """The artifacts and the checkpoints among `paths`, told apart by their run cards."""
    artifacts, checkpoints = [], []
    for path in dict.fromkeys(paths):
        card = card_path(path)
        if not Path(path).is_file():
            raise SwinQuantError(f"{path}: no such file")
        if card.is_file() and RunCard.read(card).artifact is None:
            checkpoints.append(path)
        elif not card.is_file() and Path(path).suffix in CHECKPOINTS:
            raise UsageError(
                f"{path}: has no run card {card.name} beside it: calibrate it, or bench what it exports to"
            )
        else:
            artifacts.append(open_artifact(path))
    return artifacts, checkpoints


def _origin(artifacts: Sequence[Artifact], checkpoints: Sequence[str], checkpoint: str | None) -> Path:
    """The one checkpoint of all files; its weights are the float baselines."""
    found = {Path(path).resolve(): None for path in checkpoints}
    for artifact in artifacts:
        path = find_checkpoint(artifact, checkpoint)
        if path is None:
            raise UsageError(
                f"{artifact.file}: its checkpoint, whose float model is the baseline, is neither beside it nor in the "
                "folder above: name it with ‹checkpoint›"
            )
        found[path.resolve()] = None
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise UsageError(f"the files must be made from one checkpoint, not from {names}: bench them one at a time")
    return next(iter(found))


def _engines_of(artifact: Artifact, engines: Sequence[str] | None) -> list[str]:
    """The given engines; else the one that the artifact was exported for; else all that run it."""
    if engines:
        return names_of_engines(artifact, engines)
    own = known_engines().get(str(artifact.record["options"].get("target")))
    return names_of_engines(artifact, [own.name] if own and own.runs_its_export else None)


def _candidates(
    entry: _Entry, float_types: Sequence[str] | None, options: EngineOptions, baseline: str | None, whose: str
) -> list[BenchCandidate]:
    """One candidate for each float type that the engine offers; the baseline always runs in float32 too.

    `baseline` is the name of the candidate that these are compared with; `whose` ends the names of float ones.
    """
    engine, policy = entry.engine, entry.artifact.card.policy
    backend = engine_named(engine)
    kinds: Sequence[str | None] = [None]
    if backend.float_types:
        offered = function(backend.float_types)()
        kinds = float_types or [name for name in (FLOAT32, "bfloat16") if name in offered]
        if entry.precision == FLOAT32:
            kinds = list(dict.fromkeys((FLOAT32, *kinds)))
    candidates = []
    for kind in kinds:
        if entry.is_float:
            words = [kind or entry.precision]
        else:
            half = f"+{kind}" if kind not in (None, FLOAT32) else ""
            words = [entry.precision, policy["name"] if policy else "", half]
        how = on_its_device(engine, replace(options, float_type=kind))
        load = partial(artifact_engine, str(entry.artifact.file), backend, how)
        name = " ".join(filter(None, [engine, *words])) + (whose if entry.is_float else "")
        candidates.append(BenchCandidate(name, load, entry.artifact.file, baseline))
    return candidates


def _named_apart(candidates: Sequence[BenchCandidate]) -> list[BenchCandidate]:
    """Unique names: the first, perhaps a baseline, keeps its name; later ones get a file name or number behind it."""
    names: set[str] = set()
    apart = []
    for candidate in candidates:
        choices = [candidate.name, *([f"{candidate.name} ({candidate.file.stem})"] if candidate.file else [])]
        choices += [f"{candidate.name} ({number})" for number in range(2, len(candidates) + 2)]
        name = next(choice for choice in choices if choice not in names)
        names.add(name)
        apart.append(replace(candidate, name=name))
    return apart
