"""From a calibrated checkpoint to an artifact: the model of its run card, the policy of the target, the exporter."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from yacs.config import CfgNode

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import Backend, function
from swin_quant.backends.registry import targets
from swin_quant.backends.saturation import at_risk, safe_on, without_saturation
from swin_quant.base.errors import UsageError, listed
from swin_quant.base.files import ensure_writable_dir, place_of, sha256_of
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.lineage import card_of
from swin_quant.cards.paths import card_path
from swin_quant.checkpoint.opened import open_checkpoint
from swin_quant.checkpoint.range_bits import check_bits
from swin_quant.config import from_dict
from swin_quant.loading import giving, load_for_scoring
from swin_quant.models.classifier import Classifier
from swin_quant.quant.policies import builtin_policies, described, is_builtin, load_policy
from swin_quant.quant.policy import Policy, apply_policy, policy_from_dict


def export_checkpoint(
    checkpoint: str | Path,
    target: str,
    folder: str | Path,
    cfg: CfgNode | None = None,
    policy: Policy | None = None,
    precision: str = "int8",
    options: Mapping[str, Any] | None = None,
    saturation_safe: bool = False,
) -> tuple[Artifact, Classifier]:
    """Export `checkpoint` for `target`, a backend's name; returns the artifact, and the model that it was made from.

    The config is that of the run card beside the checkpoint; `cfg` is for one that has none. `policy` None: as
    `policy_for` says. `precision` float leaves every node out. `options`: opset, float_type, batch, sm, fix_gelu_bias,
    check, as the target has them. `saturation_safe`: weights of 7 bits, for CPUs without VNNI.

    Raises SwinQuantError for a checkpoint without ranges, UsageError for what the target cannot do.
    """
    backend = backend_of(target)
    told = exporter_options(backend, precision, options or {})
    card = card_of(str(checkpoint))
    used = policy_of(target, card, checkpoint, policy, precision, saturation_safe)
    model, card = model_and_card(checkpoint, card, cfg, used)
    return _exported(model, card, backend, folder, used, precision, told, saturation_safe), model


def export_module(
    model: nn.Module,
    card: RunCard,
    file: str | Path,
    target: str,
    folder: str | Path,
    policy: Policy,
    precision: str,
    options: Mapping[str, Any],
    saturation_safe: bool = False,
) -> Artifact:
    """As `export_checkpoint`, of a model of no config, as it is in memory; `file` is where it was saved, and `policy`
    what `policy_of` gave."""
    if not isinstance(model, Classifier):
        raise UsageError(f"{type(model).__name__}: is not a network that can be exported: give it to `wrap`")
    backend = backend_of(target)
    told = exporter_options(backend, precision, options)
    check_bits(model, card, [policy], card.name)
    apply_policy(model, policy)
    return _exported(model, naming(card, file), backend, folder, policy, precision, told, saturation_safe)


def policy_of(
    target: str,
    card: RunCard | None,
    checkpoint: str | Path | None,
    policy: Policy | None,
    precision: str = "int8",
    saturation_safe: bool = False,
) -> Policy:
    """The policy of an artifact: what is asked for, or `policy_for`. UsageError for what does not go together."""
    if precision == "float":
        if policy:
            raise UsageError("‹policy› chooses what is int8: leave it out with ‹precision› float")
        policy = load_policy("float")
    if saturation_safe and (precision == "float" or not at_risk(backend_of(target))):
        raise UsageError(f"‹saturation_safe›: means nothing to ‹backend› {target} with precision {precision}")
    policy = policy or policy_for(target, card, checkpoint)
    return without_saturation(policy) if saturation_safe else policy


def _exported(
    model: nn.Module, card: RunCard, backend: Backend, folder: str | Path, used: Policy, precision: str, told: Any,
    saturation_safe: bool,
) -> Artifact:  # fmt: skip
    if saturation_safe and not set(at_risk(backend)) & set(safe_on(model)):
        raise UsageError(
            f"‹saturation_safe›: {backend.name} multiplies two activations where policy {used.name} quantizes "
            "attention, which saturates whatever the weights are: give ‹policy› cpu"
        )
    card = replace(card, policy=None if precision == "float" else used.to_dict())
    made: Artifact = function(backend.exporting.export)(model, card, ensure_writable_dir(folder), told)
    return made


def policy_for(target: str, card: RunCard | None, checkpoint: str | Path | None = None) -> Policy:
    """The policy of a target where the user names none.

    It is the run card's, so that what was calibrated and scored is what is exported: one of the user's own, whatever it
    is called, one that the model was trained under, and a built-in one that the target takes; FasterTransformer takes
    no other. Else it is one of the target's that was scored, or its best built-in one, and then a warning says that the
    card's results are not of it: calibration found the ranges of all nodes. Ranges of before zero points lack an end:
    for such a `checkpoint` it is the best without.
    """
    exports = backend_of(target).exporting
    fitting = [name for name in exports.policies if name in builtin_policies()]
    own = policy_from_dict(card.policy, card.name) if card and card.policy else None
    is_ours = own is not None and is_builtin(own)
    if exports.only:
        if own is None or (is_ours and own.name not in fitting):
            has = f"the run card's is {own.name}" if own else "there is no run card"
            raise UsageError(f"‹backend› {target} needs the policy {' or '.join(fitting)}, {has}: give ‹policy›")
        return own
    offered = [load_policy(name) for name in fitting]
    if own is None or card is None:
        return _best(offered, target, checkpoint)
    if not is_ours:
        if own.name in builtin_policies():
            log.warning("policy %s is the run card's, not the built-in %s: ‹policy› %s takes that one",
                        described(own), own.name, own.name)  # fmt: skip
        return own
    scored = {result.policy_sha256: result.policy for result in card.measured() if result.policy}
    is_made = bool(card.training or card.calibration or card.results)
    fits = own.name in fitting and is_made or own.has_float8 and any(policy.has_float8 for policy in offered)
    if card.training and not fits:
        log.warning("policy %s stays, since the model was trained under it: %s runs %s best, see ‹policy›",
                    own.name, target, fitting[0])  # fmt: skip
    elif not fits and (measured := [policy for policy in offered if policy.sha256 in scored]):
        log.info("policy %s, which was scored, of those that %s runs", measured[0].name, target)
        return measured[0]
    elif not fits:
        return _instead(own, _best(offered, target, checkpoint), target, card)
    elif scored and own.sha256 not in scored:
        log.warning("policy %s of the run card was not scored, and %s was: ‹policy› exports another",
                    own.name, listed(map(str, scored.values()), 3))  # fmt: skip
    elif own.name != fitting[0]:
        log.info("policy %s, as calibrated: %s runs %s best, which ‹policy› %s takes: score it first",
                 own.name, target, fitting[0], fitting[0])  # fmt: skip
    return own


def _instead(own: Policy, best: Policy, target: str, card: RunCard) -> Policy:
    """The best of a target, said where it is not that of the run card."""
    if own.sha256 != best.sha256:
        whose = "the run card and its results" if card.results else "the run card"
        why = "in float8" if own.has_float8 else f"not for {target}"
        log.warning("policy %s of %s is %s, and %s gets %s: `evaluate` with ‹policy› %s scores that one, "
                    "‹policy› %s keeps the other",
                    own.name, whose, why, target, best.name, best.name, own.name)  # fmt: skip
    return best


def backend_of(name: str) -> Backend:
    """A target's backend; UsageError where there is none of that name."""
    if name not in targets():
        raise UsageError(f"‹backend› {name}: there are {', '.join(targets())}")
    return targets()[name]


def _best(fitting: Sequence[Policy], target: str, checkpoint: str | Path | None) -> Policy:
    best, *others = fitting
    if checkpoint is None or not best.has_zero_points or open_checkpoint(checkpoint).has_zero_points:
        return best
    usable = next((policy for policy in others if not policy.has_zero_points), best)
    log.warning("policy %s: ranges of before zero points lack an end; calibrate again for %s, which %s runs best",
                usable.name, best.name, target)  # fmt: skip
    return usable


def model_and_card(
    checkpoint: str | Path, card: RunCard | None, cfg: CfgNode | None, policy: Policy
) -> tuple[Classifier, RunCard]:
    """The model of a checkpoint on the CPU, its ranges read and `policy` applied, and a card that names its file."""
    if cfg is None:
        if card is None:
            raise UsageError(f"{checkpoint}: has no run card {card_path(checkpoint).name} beside it: give ‹cfg›")
        cfg = from_dict(card.config, str(card_path(checkpoint)))
    subject = load_for_scoring(cfg, str(checkpoint), [policy])
    return subject.model, naming(giving(subject.card, cfg), checkpoint)


def naming(card: RunCard, checkpoint: str | Path) -> RunCard:
    """The card for what is made from `checkpoint`: it says which file that is, and where."""
    file = Path(checkpoint)
    record = card.checkpoint or {"file": file.name, "sha256": sha256_of(file)}
    return replace(card, checkpoint={**record, "path": str(place_of(file))})


def exporter_options(backend: Backend, precision: str, given: Mapping[str, Any]) -> Any:
    """The exporter's options; None values of `given` are left to it. UsageError for one that means nothing there."""
    exports = backend.exporting
    known = (*exports.flags, *(exports.float_flags if precision == "float" else ()))
    wanted = {key: value for key, value in given.items() if value is not None and value is not False}
    if idle := [key for key in wanted if key not in known]:
        raise UsageError(f"‹{idle[0]}›: means nothing to ‹backend› {backend.name} with {precision}")
    return function(exports.options)(precision=precision, **exports.fixed, **wanted)
