"""The command to go on with: what can be done with an artifact, its checkpoint and the engines here."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

from swin_quant.backends.backend import Backend
from swin_quant.backends.registry import backends, targets
from swin_quant.cards.card import RunCard
from swin_quant.config.outputs import LOGITS
from swin_quant.quant.policy import Policy

DIR = "DIR"  # a folder of pictures, where none is known
TIME = "swin-quant evaluate {file} --no-accuracy"
EXPORT_FLOAT = "swin-quant export {checkpoint} --for {target} --precision float --output {folder}"
EXPORT_FOUND = "swin-quant export {checkpoint} --for {target} --policy {policy} --output {folder}"
SEARCH = "swin-quant search {checkpoint} --data-path {data} --engine {target} --max-drop {drop} --output {folder}"
_EXPORT = "swin-quant export {checkpoint} --for {target} --output {folder}"
_SERVE = "swin-quant serve {file} --engine {engine}"
_TIME_ON = "swin-quant evaluate {file} --no-accuracy --engine {engine}"
_FINETUNE = "swin-quant finetune {checkpoint} --data-path {data} --output {folder}"
_PYTHON_FLOAT = 'sq.export(model, "{target}", "{folder}", precision="float")'


@dataclass(frozen=True)
class Abilities:
    """What an artifact and its model can do.

    `is_rebuilt`: a file builds its model, so that commands can export and search; else Python alone has it.
    `takes_pictures`: its preprocessing is known. `has_classes`: it classifies.
    """

    is_rebuilt: bool
    takes_pictures: bool
    has_classes: bool

    @classmethod
    def from_card(cls, card: RunCard) -> "Abilities":
        kind = card.config.get("MODEL", {}).get("OUTPUT_KIND", LOGITS)
        has_classes = bool(card.wrapped.get("classes")) if card.wrapped else kind == LOGITS
        return cls(card.wrapped is None, bool(card.preprocess), has_classes)


def fill(template: str, **words: object) -> str:
    """A command with its words, quoted for a shell; an engine is called as flags call it."""
    words |= {key: _flag_for(str(words[key])) for key in ("engine", "target") if key in words}
    return template.format(**{key: shlex.quote(str(word)) for key, word in words.items()})


def _flag_for(engine: str) -> str:
    """The name of an engine in flags. Results have its maker's spelling, such as ExecuTorch."""
    return next((name for name in backends() if name.lower() == engine.lower()), engine)


def after_scoring(card: RunCard, file: Path, engine: str) -> str:
    """The command behind a file that is good to deploy: serve it where pictures can be prepared for it."""
    return fill(_SERVE if Abilities.from_card(card).takes_pictures else _TIME_ON, file=file, engine=engine)


def to_export_float(card: RunCard, checkpoint: Path, target: str, folder: Path) -> str:
    """The command, or the call for a module that Python alone builds, that exports the float model."""
    if Abilities.from_card(card).is_rebuilt:
        return fill(EXPORT_FLOAT, checkpoint=checkpoint, target=target, folder=folder)
    return _PYTHON_FLOAT.format(target=target, folder=folder)


def to_recover(card: RunCard, file: Path, checkpoint: Path, data: str, engine: str, drop: float) -> str:
    """The command that wins accuracy back: a search for layers to leave float; behind one, QAT; behind both, none, and
    none for a module that Python alone builds."""
    is_searched = any(one["engine"] == _flag_for(engine) for one in card.searches)
    if not Abilities.from_card(card).is_rebuilt or (is_searched and card.is_qat):
        return after_scoring(card, file, engine)
    template = _FINETUNE if is_searched else SEARCH
    return fill(template, checkpoint=checkpoint, data=data, target=engine, drop=f"{drop:g}", folder=file.parent)


def to_export(policy: Policy | None, checkpoint: Path, folder: Path) -> str:
    """The command that exports a trained checkpoint, for a backend that takes its policy: by preference one whose
    engine runs its files here."""
    known = list(targets().values())
    named = [one for one in known if policy and policy.name in one.exporting.policies]
    able = named or [one for one in known if policy is None or one.takes(policy)] or known
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs_here = [one for one in able if one.runs_its_export and one.is_installed and one.is_fast_on(device)]
    target = next((one for one in runs_here if not one.emulates), able[0])
    return fill(_EXPORT, checkpoint=checkpoint, target=target.name, folder=folder)


def after_export(card: RunCard, file: Path, target: Backend, data: str = DIR) -> list[str]:
    """The commands behind an export, in order; what no file can build is timed alone."""
    able = Abilities.from_card(card)
    if not able.is_rebuilt:
        return [fill(TIME, file=file)]
    if not able.has_classes or (card.policy is None and target.only_quantized):
        return []
    return [fill(step, file=file, data=data) for step in target.exporting.next_step]
