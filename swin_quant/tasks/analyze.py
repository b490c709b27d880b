"""What is to be known of a model before it is deployed; nothing in it is changed, and nothing quantized."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from swin_quant.base.errors import SwinQuantError
from swin_quant.data.loader import load_batches
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import Preprocess
from swin_quant.data.sampling import sample
from swin_quant.loading import model_or_shapes
from swin_quant.models.classifier import Architecture
from swin_quant.models.registry import blocks_of
from swin_quant.operators.analysis import Analysis, Checked
from swin_quant.operators.precision import by_pictures, by_ranges, by_weights
from swin_quant.operators.replacements import REPLACEMENTS, chosen
from swin_quant.operators.replacing import Replacing, compare
from swin_quant.operators.roofline import limits, load_machine
from swin_quant.operators.support import chosen_targets, status_of
from swin_quant.operators.trace import Call, trace
from swin_quant.operators.variation import training_only, variations
from swin_quant.quant.advice import Advice
from swin_quant.quant.eval_mode import eval_mode
from swin_quant.quant.quantizer import named_nodes

MACHINE = "t4"


def analyze_checkpoint(
    cfg: CfgNode, checkpoint: str | None = None, pictures: Tensor | None = None, batch: int = 1, **options: Any
) -> Analysis:
    """Analyse the model that `cfg` describes, with the weights and ranges of `checkpoint` if there is one.

    `options` are those of `analyze_module`.
    """
    model = model_or_shapes(cfg, checkpoint)
    shape = (batch, model.in_chans, cfg.DATA.IMG_SIZE, cfg.DATA.IMG_SIZE)
    return analyze_module(model, shape, cfg.MODEL.NAME, pictures, **options)


def analyze_module(
    model: nn.Module,
    images: Sequence[int],
    name: str = "model",
    pictures: Tensor | None = None,
    *,
    machine: str = MACHINE,
    targets: Sequence[str] | None = None,
    replace: Sequence[str] = (),
    check: bool = False,
) -> Analysis:
    """Analyse a model for pictures of shape `images`, [B, in, H, W], in evaluation mode.

    `pictures`, preprocessed, show risks that weights do not. `machine`: whose peaks limits are computed from, a shipped
    name or a YAML file. `replace`: replacements (`operators.replacements`) that are applied first. `check`: run every
    replacement on the model, on `pictures` or on noise, and compare the outputs.

    Raises NotTraceable, with the name of the module, for a model that cannot be followed.
    """
    tables, peaks, wanted = chosen_targets(targets), load_machine(machine), chosen(replace)
    inside: Callable[[], AbstractContextManager[Any]] = partial(Replacing, wanted)
    calls = trace(model, images, inside)
    blocks, network = _blocks(model, calls)
    statuses = {
        call.name: {key: status_of(table, call.name, network) for key, table in tables.items()} for call in calls
    }
    return Analysis(
        name,
        tuple(images),
        sum(parameter.numel() for parameter in model.parameters()),
        calls,
        {key: table.title for key, table in tables.items()},
        {key: table.sources for key, table in tables.items()},
        statuses,
        variations(model, images, trace(model, images) if replace else calls),
        training_only(model),
        _risks(model, pictures),
        0 if pictures is None else len(pictures),
        not any(parameter.is_meta for parameter in model.parameters()),
        peaks,
        limits(calls, blocks, peaks),
        _checked(model, images, pictures) if check else (),
        list(replace),
    )


def _blocks(model: nn.Module, calls: Sequence[Call]) -> tuple[list[str], str | None]:
    """Names of the blocks, and of the architecture; of an unknown model, of what lies below its lists of layers."""
    known = getattr(model, "architecture", None)
    if isinstance(known, Architecture) and (blocks := blocks_of(model)):
        return list(blocks), known.name
    parts = dict.fromkeys(".".join(call.module.split(".")[:2]) for call in calls if call.module)
    return list(parts), known.name if isinstance(known, Architecture) else None


def _risks(model: nn.Module, pictures: Tensor | None) -> list[Advice]:
    if any(parameter.is_meta for parameter in model.parameters()):
        return []
    found = [*by_weights(model)]
    if named_nodes(model):
        found += by_ranges(model)
    if pictures is not None:
        with eval_mode(model):
            found += by_pictures(model, pictures.to(_device(model)))
    return found


def _checked(model: nn.Module, images: Sequence[int], pictures: Tensor | None) -> list[Checked]:
    if pictures is None:
        pictures = torch.randn(tuple(images), generator=torch.Generator().manual_seed(0))
    with eval_mode(model):
        found = compare(model, pictures.to(_device(model)), REPLACEMENTS)
    return [Checked(name, REPLACEMENTS[name].what, *found[name]) for name in REPLACEMENTS]


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def some_pictures(pictures: Pictures, preprocess: Preprocess, count: int, seed: int = 0) -> Tensor:
    """A sample of them, preprocessed: [count, 3, S, S], or as many as there are. SwinQuantError if none can be read."""
    indices = sample(len(pictures), min(count, len(pictures)), seed)
    (batch,) = load_batches(pictures, preprocess, [indices])
    if not len(batch.images):
        raise SwinQuantError(f"none of {len(indices)} pictures of ‹data_path› can be read")
    return batch.images
