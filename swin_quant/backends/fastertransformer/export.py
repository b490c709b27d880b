"""Export to FasterTransformer: the calibrated checkpoint for its scripts, and the weight list for its op.

The files of one export: <NAME>_<kind>_sm‹sm›.safetensors with its run card and manifest, load_weights.py, and the
checkpoint with FasterTransformer's keys and no others. They are written to a temporary folder and moved when all are
complete, the card last. `--check` reads the export back, undoes every layout, and compares it with the model.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from swin_quant.backends.artifact import Artifact, finish_artifact
from swin_quant.backends.fastertransformer import load_weights
from swin_quant.backends.fastertransformer.emulator import Emulator
from swin_quant.backends.fastertransformer.layouts import is_misread
from swin_quant.backends.fastertransformer.limits import (
    INSTEAD,
    check_half_range,
    check_limits,
    find_int8_mode,
    list_warnings,
)
from swin_quant.backends.fastertransformer.manifest import make_manifest, manifest_name, read_export
from swin_quant.backends.fastertransformer.slots import HEAD, Case, slots
from swin_quant.backends.fastertransformer.weights import WeightSource, stored_form
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import atomic_write_bytes, compute_sha256, ensure_writable_dir, reason, write_json
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.checkpoint import save_calibrated, save_float
from swin_quant.config.outputs import LOGITS
from swin_quant.models.layers import Swin
from swin_quant.models.swin_v2 import get_version
from swin_quant.quant.layer import made_factors
from swin_quant.quant.policy import policy_from_dict

PICTURES = 4
BACKEND = "fastertransformer"


def check(artifact: Artifact, model: Swin) -> dict[str, float]:
    """Tensor of the export -> its largest difference from its source: in the source's unit, for kernels in int8 steps.

    SwinQuantError names those beyond rounding.
    """
    stored = read_export(artifact)
    source, found, broken = WeightSource(model, stored.case.int8), dict[str, float](), list[str]()
    for slot in stored.entries:
        if slot.layout == "empty":
            continue
        got, want = stored.tensors[slot.name].double(), source(slot).double()
        # Storing errs by half a unit in the last place; kernels are rounded to float16 before int8.
        half_ulp = 2.0**-24 if slot.dtype == "float32" else 2.0**-11
        if slot.container:
            want = want * 127 / source.weight_range(slot)
            allowed = 0.5 + want.abs() * half_ulp + 1e-4
            want = want.clamp(-128, 127)
        else:
            allowed = want.abs() * half_ulp + (2.0**-25 if slot.dtype == "float16" else 0.0)
        difference = (got - want).abs()
        found[slot.name] = difference.max().item()
        broken += [slot.name] if (difference > allowed).any() else []
    head = [(stored.head[0] - model.head.weight.cpu()), (stored.head[1] - model.head.bias.cpu())]
    broken += [name for name, rest in zip(stored.manifest["head"], head, strict=True) if rest.abs().max() > 0]
    if broken:
        raise SwinQuantError(
            f"{artifact.file}: {len(broken)} tensors differ from the model by more than rounding: {listed(broken, 3)}; "
            "export again"
        )
    return found


def misreading(artifact: Artifact) -> list[str]:
    """One line on the effect of fc1's biases that the GELU kernel misreads; none for models without such biases.

    Measured on seeded noise: the emulated export as the kernel reads it, against the same export with the right biases.
    """
    stored = read_export(artifact)
    if not stored.case.int8 or not is_misread(stored.case.widest):
        return []
    g = stored.case.g
    noise = torch.randn(PICTURES, g.in_chans, g.image_size, g.image_size, generator=torch.Generator().manual_seed(0))
    read, meant = (Emulator(stored, misread=misread)(noise) for misread in (True, False))
    if stored.case.fix_gelu_bias and torch.equal(read, meant):
        return [f"fc1's bias of {stored.case.widest} channels is stored as the kernel of GELU reads it"]
    change = read - meant
    sqnr = 10 * (meant.square().sum() / change.square().sum()).log10()
    return [
        f"fc1's bias of {stored.case.widest} channels is read three places off by the kernel of GELU: on {PICTURES} "
        f"pictures of noise mean |Δlogit| {change.abs().mean():.3g}, max {change.abs().max():.3g}, SQNR {sqnr:.1f} dB; "
        "‹fix_gelu_bias› undoes it"
    ]


@dataclass(frozen=True)
class FasterTransformerOptions:
    """Options of the export. `precision`: int8 or float, in this `float_type`. `sm`: the target's compute capability
    (80 for 8.0). `batch`: the most pictures that the op takes.

    `fix_gelu_bias`: store fc1's biases of more than 4096 channels so that the GELU kernel, which misreads them, gets
    the right ones; the TensorRT plugin cuts off three of them. `check`: read the export back and compare it with the
    model.
    """

    precision: str = "int8"
    float_type: str = "float16"
    sm: int = 80
    batch: int = 128
    fix_gelu_bias: bool = False
    check: bool = False

    @property
    def kind(self) -> str:
        """int8, float16 or float32."""
        return self.precision if self.precision == "int8" else self.float_type


def export(
    model: nn.Module,
    card: RunCard,
    folder: Path,
    options: FasterTransformerOptions = FasterTransformerOptions(),
) -> Artifact:
    """Write the export of a calibrated `model` into `folder`. The policy in `card` decides the int8 mode.

    UsageError for what the kernels cannot do; SwinQuantError for missing ranges, and for ranges that overflow float16.
    """
    if not isinstance(model, Swin) or model.output_kind != LOGITS:
        raise UsageError(
            "FasterTransformer has kernels of Swin V1 and V2 as classifiers only: export to another backend"
        )
    if made := made_factors(model):
        raise UsageError(
            f"FasterTransformer cannot run this model: `equalize` put factors at {listed(made, 2)}, a multiplication "
            "that the kernels do not have: calibrate the float checkpoint under ft-mode1"
        )
    mode = None
    if options.kind == "int8":
        mode = find_int8_mode(model, policy_from_dict(card.policy, f"run card {card.name}") if card.policy else None)
    target = options.kind, options.sm, options.fix_gelu_bias
    case = Case(model.geometry, get_version(model), *target, mode, options.batch)
    check_limits(case)
    source = WeightSource(model, case.int8)
    beyond = card.calibration["beyond_half"] if card.calibration else []
    check_half_range(source.ranges, beyond, options.kind)
    name = f"{card.name}_{options.kind}_sm{options.sm}"
    folder = ensure_writable_dir(folder)
    file, theirs = folder / f"{name}.safetensors", folder / f"{card.name}_calib.pth"
    try:
        # FasterTransformer's checkpoint has its scripts' own name, unless the exported checkpoint has it
        exported = card.checkpoint and theirs.is_file() and compute_sha256(theirs) == card.checkpoint["sha256"]
        calibrated = f"{name}_calib.pth" if exported else theirs.name
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder) as scratch:
            others = _write(model, card.name, calibrated, case, source, Path(scratch) / file.name)
            _refuse_to_lose(folder / others[0].name, others[0], file)
            card_path(file).unlink(missing_ok=True)  # without a card, an unfinished file is not taken for an export
            for part in (*others, Path(scratch) / file.name):
                os.replace(part, folder / part.name)
    except OSError as error:
        raise SwinQuantError(f"{folder}: the export cannot be written: {reason(error)}") from error
    for warning in list_warnings(case):
        log.warning("%s", warning)
    card = card if case.int8 else replace(card, policy=None)
    record = {
        "sm": options.sm,
        "kind": options.kind,
        "max_batch": options.batch,
        "fix_gelu_bias": options.fix_gelu_bias,
        "int8_mode": case.int8_mode,
    }
    artifact = finish_artifact(file, card, BACKEND, options.kind, record, [folder / part.name for part in others])
    if options.check:
        tensors = len(check(artifact, model))
        for line in (f"{tensors} tensors differ from the model by rounding alone", *misreading(artifact)):
            log.info("check: %s", line)
    return artifact


def _write(model: Swin, name: str, calibrated: str, case: Case, source: WeightSource, file: Path) -> list[Path]:
    """Write every file of the export beside `file`. Returns all but `file`, the checkpoint first."""
    checkpoint = file.with_name(calibrated if case.int8 else f"{file.stem}.pth")
    if case.int8:
        save_calibrated(model, checkpoint, ends=False)  # names nodes without a positive range
    else:
        save_float(model, checkpoint)
    tensors: dict[str, Tensor] = {}
    for slot in slots(case):
        tensors[slot.key] = tensor = stored_form(slot, source, case.g)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise SwinQuantError(f"{slot.name} has values beyond float16 (65504): {INSTEAD.format('float32')}")
    for key in HEAD:
        tensors[key] = model.get_parameter(key).detach().float().cpu().contiguous()
    atomic_write_bytes(file, save(tensors, {"format": "pt"}))
    manifest = file.with_name(manifest_name(file))
    write_json(manifest, make_manifest(name, file.name, case))
    loader = file.with_name("load_weights.py")
    shutil.copyfile(load_weights.__file__, loader)
    return [checkpoint, manifest, loader]


def _refuse_to_lose(target: Path, new: Path, file: Path) -> None:
    """UsageError if the export would overwrite `target`, a checkpoint of the user."""
    if not target.exists() or compute_sha256(target) == compute_sha256(new):
        return
    earlier = RunCard.read(card_path(file)).artifact if card_path(file).is_file() else None
    known = {other["file"]: other["sha256"] for other in earlier["others"]} if earlier else {}
    if known.get(target.name) != compute_sha256(target):
        raise UsageError(f"{target}: is another checkpoint, and would be overwritten: export into another folder")
