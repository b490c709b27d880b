"""The target of an export: its backend and options, the policy that it gets, the artifact that is written."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from torch import nn

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import Backend, function
from swin_quant.backends.registry import takers, target_named, targets
from swin_quant.backends.saturation import at_risk, safe_on, without_saturation
from swin_quant.base.errors import UsageError
from swin_quant.base.files import compute_sha256, ensure_writable_dir, resolve_path
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.checkpoint.opened import open_checkpoint
from swin_quant.config.outputs import LOGITS
from swin_quant.quant.policy import Policy, builtin_policies, described, is_builtin, load_policy, policy_from_dict


def engine_for(target: Backend) -> str | None:
    """The engine that its artifact is verified and scored on; None where it is not here, or has to be built."""
    if target.load:
        return target.name if target.runs_its_export and target.is_installed else None
    return next((backend.name for backend in takers(target.exporting.artifact) if backend.is_installed), None)


def exporter_options(backend: Backend, precision: str, values: Mapping[str, Any]) -> Any:
    """The exporter's options; it chooses the ones that are None in `values`. UsageError for an option that it lacks."""
    exports = backend.exporting
    known = (*exports.flags, *(exports.float_flags if precision == "float" else ()))
    wanted = {key: value for key, value in values.items() if value is not None and value is not False}
    if idle := [key for key in wanted if key not in known]:
        raise UsageError(f"‹{idle[0]}›: means nothing to ‹backend› {backend.name} with {precision}")
    return function(exports.options)(precision=precision, **exports.fixed, **wanted)


def float_type_options(target: Backend, engine: Backend | None, float_type: str | None) -> dict[str, str]:
    """Exporter options that make the file of `target` run in this type on `engine` (None: the target's own).

    Empty where the engine itself chooses. UsageError for a type that neither has.
    """
    runs = engine or target
    if float_type is None or (runs.float_types and not runs.is_installed):
        return {}
    able = [runs.only_float_type] if runs.only_float_type else []
    if runs.float_types:  # it chooses among these when it runs a file
        able = function(runs.float_types)()
    if not able:  # the export decides
        options = {"float_type": float_type}
        exporter_options(target, "int8", options)
        return options
    if float_type not in able:
        raise UsageError(f"‹float_type› {float_type}: {runs.name} runs what is not int8 in {' or '.join(able)} here")
    return {}


@dataclass(frozen=True)
class ExportTarget:
    """A backend, the precision of its file, and the exporter's options. `plain`: a file without compiled operators."""

    backend: Backend
    precision: str
    options: Any
    saturation_safe: bool = False
    plain: bool = False

    @classmethod
    def parse(
        cls, name: str, precision: str, values: Mapping[str, Any] | None = None, saturation_safe: bool = False
    ) -> "ExportTarget":
        """UsageError for a backend that is none, and for options that it lacks."""
        backend, given = target_named(name), values or {}
        options = exporter_options(backend, precision, given)
        return cls(backend, precision, options, saturation_safe, bool(given.get("plain")))

    def policy(self, card: RunCard | None, checkpoint: str | Path | None, policy: Policy | None = None) -> Policy:
        """The policy of the artifact: the user's, else that of `policy_for`. UsageError for options that contradict."""
        name = self.backend.name
        if self.precision == "float":
            if policy:
                raise UsageError("‹policy› chooses what is int8: leave it out with ‹precision› float")
            policy = load_policy("float")
        if self.saturation_safe and (self.precision == "float" or not at_risk(self.backend)):
            raise UsageError(f"‹saturation_safe›: means nothing to ‹backend› {name} with precision {self.precision}")
        policy = policy or policy_for(name, card, checkpoint, self.plain or self.saturation_safe)
        if self.precision != "float":
            check_policy(self.backend, policy)
        return without_saturation(policy) if self.saturation_safe else policy

    def write(self, module: nn.Module, card: RunCard, file: Path, folder: str | Path, used: Policy) -> Artifact:
        """Write the artifact of a module under a policy, which is applied; its card names `file`, the checkpoint."""
        if self.saturation_safe and not set(at_risk(self.backend)) & set(safe_on(module)):
            raise UsageError(
                f"‹saturation_safe›: {self.backend.name} multiplies two activations where policy {used.name} quantizes "
                "attention, which saturates whatever the weights are: give ‹policy› cpu"
            )
        record = card.checkpoint or {"file": file.name, "sha256": compute_sha256(file)}
        policy = None if self.precision == "float" else used.to_dict()
        card = replace(card, checkpoint={**record, "path": str(resolve_path(file))}, policy=policy)
        is_new = not Path(folder).exists()
        place = ensure_writable_dir(folder)
        try:
            made: Artifact = function(self.backend.exporting.export)(module, card, place, self.options)
        except BaseException:
            if is_new:
                with contextlib.suppress(OSError):  # it holds something
                    place.rmdir()
            raise
        return made


def check_model(target: Backend, config: Mapping[str, Any]) -> None:
    """UsageError for the model of a configuration (empty: a wrapped module) that `target` has no kernels for."""
    only, model = target.exporting.classifiers, config.get("MODEL", {})
    if only and (model.get("TYPE") not in only or model.get("OUTPUT_KIND", LOGITS) != LOGITS):
        raise UsageError(f"‹backend› {target.name} runs Swin V1 and V2 as classifiers only: choose another backend")


def check_policy(target: Backend, policy: Policy) -> None:
    """UsageError for a built-in policy of other targets where `target` runs its own alone, and for activations of bits
    that no file of `target` holds."""
    names, held = target.exporting.policies, target.exporting.activation_bits
    if target.exporting.only and is_builtin(policy) and policy.name not in names:
        raise UsageError(f"‹policy› {policy.name}: {target.name} runs {' and '.join(names)} alone")
    if held and policy.activation_bits.isdisjoint(held) and not policy.has_float8:
        wide, able = sorted(policy.activation_bits), [name for name, one in targets().items() if one.takes(policy)]
        by_flag = {f"A{bits}" for bits in wide} & {*policy.name.split()}  # as `PolicyChoice` calls it
        remedy = f"give ‹aprec› {min(held)}" if by_flag else "choose another ‹policy›"
        remedy += f", or ‹backend› {' or '.join(able)}" if able else ""
        raise UsageError(
            f"‹policy› {policy.name}: {remedy}: its activations have {' or '.join(map(str, wide))} bits, those in "
            f"files for {target.name} {' or '.join(map(str, held))}"
        )


def policy_for(target: str, card: RunCard | None, checkpoint: str | Path | None = None, plain: bool = False) -> Policy:
    """The policy of a target where the user names none.

    The run card's policy stays, so that the export is the model that was scored, in four cases: the policy is the
    user's own, the model was trained under it, it has fewer than 8 bits and the target's files hold them, or it is one
    of the target's (FasterTransformer takes no other). Otherwise it is a policy of the target that was scored, or the
    target's best built-in one: calibration found the ranges of all nodes. A warning says that the card's results belong
    to another policy. A `checkpoint` whose ranges are older than zero points lacks one end of each range, and gets the
    best policy without zero points. `plain`: the best is that of a file without compiled operators.
    """
    backend = target_named(target)
    exports = backend.exporting
    best_first = exports.policies if plain or card is None else exports.policies_for(card.config)
    fitting = [name for name in best_first if name in builtin_policies()]
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
            told = "policy %s is the run card's, not the built-in %s: ‹policy› %s takes that one"
            log.warning(told, described(own), own.name, own.name)
        return own
    scored = {result.policy_sha256 for result in card.measured() if result.policy}
    is_made = bool(card.training or card.calibration or card.results)
    fits = own.name in fitting and is_made or own.has_float8 and any(policy.has_float8 for policy in offered)
    is_narrow = any((rule.bits or 8) < 8 for rule in own.rules) and backend.takes(own)  # chosen for its weights
    stays = fits or is_narrow or bool(card.training)
    measured = next((policy for policy in offered if policy.sha256 in scored), None)
    chosen = own if stays else measured or _best(offered, target, checkpoint)
    is_other = chosen.sha256 not in scored and (bool(scored) or chosen.sha256 != own.sha256)
    is_other = is_other or not (fits or is_narrow) and stays
    # A file for any engine has no best policy.
    if is_other or chosen is not own or (chosen.name != fitting[0] and backend.load and not is_narrow):
        told = f"policy {chosen.name} goes into the file, not the run card's {own.name}"
        if chosen is own:
            told = f"the run card's policy {own.name} goes into the file"
        told += "; %s runs policy %s best: ‹policy› chooses"
        log.log(WARNING if is_other else INFO, told, target, fitting[0])
    return chosen


def _best(fitting: Sequence[Policy], target: str, checkpoint: str | Path | None) -> Policy:
    best, *others = fitting
    opened = open_checkpoint(checkpoint) if checkpoint else None
    if not opened or not best.has_zero_points or opened.has_zero_points or not opened.is_calibrated:
        return best
    usable = next((policy for policy in others if not policy.has_zero_points), best)
    told = "policy %s: these ranges have no lower end for zero points; calibrate again for %s, which %s runs best"
    log.warning(told, usable.name, best.name, target)
    return usable
