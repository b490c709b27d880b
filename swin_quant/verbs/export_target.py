"""The target of an export: its backend and options, the policy that it gets, the artifact that is written."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.backend import Backend, function
from swin_quant.backends.registry import takers, target_named
from swin_quant.backends.saturation import at_risk, safe_on, without_saturation
from swin_quant.base.errors import UsageError
from swin_quant.base.files import compute_sha256, ensure_writable_dir, resolve_path
from swin_quant.cards.card import RunCard
from swin_quant.quant.policy import Policy, load_policy
from swin_quant.verbs.export_policy import policy_for


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
        made: Artifact = function(self.backend.exporting.export)(
            module, card, ensure_writable_dir(folder), self.options
        )
        return made
