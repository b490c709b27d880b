"""`export`, and an artifact as something to call."""

from pathlib import Path
from typing import Any

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import ensure_writable_dir
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.exported import Exported
from swin_quant.model import Model
from swin_quant.quant.policies import load_policy
from swin_quant.quant.policy import Policy, settings_for
from swin_quant.quant.quantizer import named_nodes
from swin_quant.saving import place_for
from swin_quant.tasks.export import (
    backend_of,
    export_checkpoint,
    export_module,
    exporter_options,
    policy_for,
    policy_of,
)


def export(
    model: Model,
    backend: str,
    folder: str | Path,
    policy: str | Policy | None = None,
    *,
    precision: str = "int8",
    saturation_safe: bool = False,
    **options: Any,
) -> Exported:
    """Export `model` for a backend ("openvino", "onnxruntime", "tensorrt", "cuda", ...) into `folder`.

    `policy` None: the model's, if that backend takes it, else its best, which a warning names. `options` are those
    of `swin-quant export`: opset, float_type, batch, sm, labels, ... A model that is in no file yet is saved in the
    folder first: an artifact is verified against its checkpoint.
    """
    exporter_options(backend_of(backend), precision, options)  # what is wrong is said before a file is written
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    if chosen is None and precision != "float":
        chosen = policy_for(backend, model.card, model.file)  # the model's card: the file's may be of before a search
    used = policy_of(backend, model.card, model.file, chosen, precision, saturation_safe)
    _need_ranges(model, used)
    file = file_of(model, ensure_writable_dir(folder))
    if not model.card.config:
        made = export_module(model.module, model.card, file, backend, folder, used, precision, options, saturation_safe)
        return Exported(made)
    made, _ = export_checkpoint(file, backend, folder, model.config, chosen, precision, options, saturation_safe)
    return Exported(made)


def _need_ranges(model: Model, policy: Policy) -> None:
    """SwinQuantError where a node that is on has none."""
    nodes = named_nodes(model.module)
    on = [name for name, setting in settings_for(model.module, policy).items() if setting.enabled]
    if without := [name for name in on if nodes[name].amax is None]:
        raise SwinQuantError(
            f"{model.name}: {listed(without, 2)} of policy {policy.name} have no range: calibrate it, or export it "
            "with ‹precision› float"
        )


def file_of(model: Model, folder: Path) -> Path:
    """The checkpoint that `model` is in; it is saved in `folder` where there is none yet.

    UsageError where its weights are others by now, and where something else lies there, which no model of that name was
    saved as.
    """
    refuse_changed(model)
    if model.file:
        return model.file
    place = folder / f"{model.name}_float.pth"
    if model.is_calibrated:
        place = place_for(folder, model.module, model.card)
    if (place.exists() or card_path(place).exists()) and not _was_saved(place, model.name):
        raise UsageError(f"{place}: was not written by `save` of {model.name}: give another folder, or save it first")
    return model.save(place)


def refuse_changed(model: Model) -> None:
    """UsageError where the weights of a model are no longer those of its file, of which results would be."""
    if model.is_changed:
        raise UsageError(f"{model.name}: its weights were changed since {model.file}: `save` it to another file first")


def _was_saved(place: Path, name: str) -> bool:
    try:
        return RunCard.read(card_path(place)).name == name
    except SwinQuantError:
        return False
