"""Wrap a network of your own as a model: captured, with nodes at products and additions."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from swin_quant.arguments import checked
from swin_quant.base.errors import SwinQuantError, UsageError, first_line, listed
from swin_quant.cards.card import RunCard
from swin_quant.cards.records import WrappedRecord
from swin_quant.checkpoint import load_calibrated, load_float
from swin_quant.checkpoint.opened import OpenedCheckpoint
from swin_quant.config.outputs import FEATURES, LOGITS
from swin_quant.data.inputs import Inputs
from swin_quant.data.preprocess import Preprocess
from swin_quant.model import Model, weights_digest
from swin_quant.models.captured import captured
from swin_quant.models.classifier import Classifier
from swin_quant.quant.fold import is_fold_exact
from swin_quant.quant.policy import apply_policy, policy_from_dict

_CLOSE = 1e-4  # share of the largest output: folded constants may round otherwise
_EXAMPLES = 2


@checked
def wrap(
    module: nn.Module,
    size: int | Sequence[int] | Mapping[str, Tensor] | Inputs,
    *,
    name: str = "model",
    channels: int = 3,
    preprocess: Preprocess | None = None,
    stem: bool = True,
    output: str | Sequence[str] | None = None,
    class_names: Sequence[str] = (),
) -> Model:
    """A network of your own, any nn.Module that torch.export captures, ready to calibrate; `module` stays as it is.

    `size`: the side of square pictures [B, channels, size, size], (height, width) of oblong ones, or the whole shape of
    one input: (1, 1024, 64) for a spectrogram, (3, 16, 112, 112) for a video; for a module with several inputs, an
    example [B, ...] of each by the name of its argument. Linears, convolutions (batch norms are folded into them),
    products of attention and additions get nodes (docs/any_model.md); `stem` False leaves the layer that reads the
    pictures float. `output`: the tensors or groups of tensors, by their names in the module's output, that are compared
    and exported; by default `logits` if there are some, else every one of float numbers. `class_names`: in the order of
    the logits; without them, those of the pictures that calibrate it. SwinQuantError where the module cannot be
    captured, with the line and the reason, gives NaN, or computes something else when captured, since its control flow
    depends on its input.
    """
    if isinstance(module, Model | Classifier):
        raise UsageError(f"{name}: is a model already: give it to sq.calibrate")
    if not isinstance(module, nn.Module):
        raise UsageError(f"wrap takes a torch.nn.Module, not {type(module).__name__}")
    if preprocess is not None and not isinstance(preprocess, Preprocess):
        example = 'sq.Preprocess(224, True, "bicubic", mean=(0, 0, 0), std=(1, 1, 1))'
        kind = preprocess if isinstance(preprocess, str) else type(preprocess).__name__
        raise UsageError(f"preprocess is {kind!r}: give that of the training, like {example}")
    named = Inputs.from_examples(size) if isinstance(size, Mapping) else size
    inputs = named if isinstance(named, Inputs) else None
    input_shape = named.shape if isinstance(named, Inputs) else _make_shape(named, channels)
    made = (len(preprocess.mean), *preprocess.sides) if preprocess and preprocess.is_square else input_shape
    if made != input_shape:
        taken = f"takes {list(input_shape)}, and its `preprocess` makes {list(made)}"
        raise UsageError(f"{name}: {taken}: give another `size`")
    _check_parts(name, module)
    given = _copied(module).eval()  # before a hook of the module keeps what capturing gives it
    original = _uncompiled(_copied(module)).eval()
    device = next((parameter.device for parameter in original.parameters()), torch.device("cpu"))
    seeded = torch.Generator().manual_seed(0)
    images = inputs.noise(_EXAMPLES) if inputs else torch.randn(_EXAMPLES, *input_shape, generator=seeded)
    images = images.to(device)

    def run(images: Tensor) -> object:
        return original(**inputs.unpack(images)) if inputs else original(images)

    with torch.no_grad():
        try:
            result, again = (run(images.clone()) for _ in range(2))  # it may write into its input
        except Exception as error:
            shown = f"inputs {listed(inputs.names, 8)}" if inputs else list(images.shape)
            raise SwinQuantError(f"{name}: does not take {shown}: {first_line(error)[:200]}") from error
        while kinds := {type(leaf) for leaf in _pytree.tree_leaves(result) if is_dataclass(type(leaf))}:
            for kind in kinds:  # torch would take one for a value
                torch.export.register_dataclass(kind)
        tensors = _named(result)
        wanted = _chosen(tensors, output, name)
        _check_outputs(wanted, tensors, _named(again), name)
        places = [list(tensors).index(key) for key in wanted]
        first = next(iter(wanted.values()))
        has_classes = len(wanted) == 1 and first.dim() == 2
        classes = first.shape[1] if has_classes else 0
        if class_names and len(class_names) != classes:
            raise UsageError(f"{name}: has {classes} classes, but {len(class_names)} `class_names`: name each")
        network = captured(original, input_shape, classes, what=name, stem=stem, outputs=places, inputs=inputs)
        if not has_classes:
            network.output_kind, network.any_size, network.output_names = FEATURES, False, tuple(wanted)
        network.eval()
        if not is_fold_exact(network, images):
            network.foldable, network.own_exchanges = {}, ()
        reference = GivenModule(given, places, [one.dim() for one in wanted.values()], inputs)
        for rows in ([0, 1], [0, 1, 0], [0]):  # as many as were captured, and other numbers
            _check_captured(name, network, reference, images[rows])
    asked = output if isinstance(output, str) else None
    how = WrappedRecord(shape=list(input_shape), stem=stem, output=asked, outputs=list(wanted), classes=classes)
    if constants := _constants(network):
        how["constants"] = constants
    if inputs:
        how["inputs"] = inputs.records()
    how["weights"] = weights_digest(network)
    prepared = preprocess.to_dict() if preprocess else {}
    model = Model(network, card=RunCard(name, {}, prepared, wrapped=how, class_names=list(class_names)))
    model.keep_original(reference)
    return model


def _copied(module: nn.Module) -> nn.Module:
    """A deep copy, also of a module whose weight a hook computes, or that keeps tensors of an earlier forward pass, as
    timm's LeViT does: torch copies no tensor with a gradient function."""
    values = [one for part in module.modules() for one in _pytree.tree_leaves(vars(part)) if isinstance(one, Tensor)]
    return copy.deepcopy(module, {id(value): value.detach().clone() for value in values if not value.is_leaf})


def _uncompiled(module: nn.Module) -> nn.Module:
    """A module with its own parts in the place of what torch.compile made of them, whose names files leave out."""
    for name, part in reversed(list(module.named_modules())):
        if isinstance(own := getattr(part, "_orig_mod", None), nn.Module):
            if not name:
                return _uncompiled(own)
            module.set_submodule(name, own)
    return module


def _check_captured(name: str, network: nn.Module, reference: nn.Module, images: Tensor) -> None:
    """SwinQuantError where a captured network computes something else than the module."""
    try:
        results = network(images.clone()), reference(images.clone())  # modules may write into their input
    except Exception as error:
        raise SwinQuantError(f"{name}: does not take a batch of {len(images)}: {first_line(error)[:200]}") from error
    found, expected = ([one] if isinstance(one, Tensor) else one for one in results)
    for ours, theirs in zip(found, expected, strict=True):
        if len(theirs) != len(images):
            raise SwinQuantError(f"{name}: gives {list(theirs.shape)} for a batch of {len(images)}, not one each")
        if ours.shape != theirs.shape or (ours - theirs).abs().max() > _CLOSE * theirs.abs().max():
            flow = "its control flow depends on its input, or on the number of pictures"
            raise SwinQuantError(f"{name}: computes something else when captured, for a batch of {len(images)}: {flow}")


class GivenModule(nn.Module):
    """A copy of the module as the user gave it, which every comparison refers to: [B, *input_shape] -> the outputs at
    `places` in the tree of its output, a single one alone. A single picture that loses its batch by a `squeeze` has it
    again."""

    def __init__(self, module: nn.Module, places: Sequence[int], dims: Sequence[int], inputs: Inputs | None) -> None:
        super().__init__()
        self.module, self.places, self.dims, self.inputs = module, tuple(places), tuple(dims), inputs

    def forward(self, images: Tensor) -> Tensor | list[Tensor]:
        output = self.module(**self.inputs.unpack(images)) if self.inputs else self.module(images)
        leaves, _ = _pytree.tree_flatten(output)
        found = [leaves[place] for place in self.places]
        if len(images) == 1:
            found = [one if one.dim() == dim else one.unsqueeze(0) for one, dim in zip(found, self.dims, strict=True)]
        return found[0] if len(found) == 1 else found


def wrapped_again(checkpoint: OpenedCheckpoint, module: nn.Module, device: str = "cpu") -> Model:
    """The calibrated model in a checkpoint of a wrapped module; `module` is one of the same structure.

    UsageError for a checkpoint whose run card is missing, or of no wrapped module. SwinQuantError where a constant of
    `module` that no checkpoint holds is another one.
    """
    card = checkpoint.card
    if card is None or card.wrapped is None:
        raise UsageError(f"{checkpoint}: has no run card of a wrapped module beside it: load it without a module")
    how = card.wrapped
    taken = Inputs.from_records(how["inputs"]) if "inputs" in how else how["shape"]
    again = wrap(module, taken, stem=how["stem"], output=how["outputs"], name=card.name)
    own = again.card.wrapped or how
    given = again.original if own.get("weights") == how.get("weights") else None  # else of other weights
    network, constants = again.module.to(device), own.get("constants", {})
    for key, sums in how.get("constants", {}).items():
        there = constants.get(key)
        if there and max(abs(one - other) for one, other in zip(there, sums, strict=True)) > _CLOSE * sums[1]:
            remedy = "give the module with its own, or make it a parameter or a buffer that its state_dict holds"
            raise SwinQuantError(f"{checkpoint}: was calibrated with another {key}, which it does not hold: {remedy}")
    if card.policy:
        apply_policy(network, policy_from_dict(card.policy, f"the run card of {checkpoint}"))
        load_calibrated(network, checkpoint)
    else:
        load_float(network, checkpoint)
    model = Model(network, card=card, file=checkpoint.file)
    if given is not None:
        model.keep_original(given.to(device))
    return model


def _constants(network: nn.Module) -> dict[str, list[float]]:
    """Two sums over each buffer that no checkpoint holds, of its values and of their magnitudes, weighted by place."""
    found, kept = {}, {*network.state_dict()}
    for name, value in network.named_buffers():
        if name not in kept:
            flat = (torch.view_as_real(value) if value.is_complex() else value).double().nan_to_num(0, 1, -1).flatten()
            parts = flat * torch.linspace(1, 2, len(flat), dtype=torch.float64, device=flat.device)
            found[name] = [parts.sum().item(), parts.abs().sum().item()]
    return found


def _make_shape(size: int | Sequence[int], channels: int) -> tuple[int, ...]:
    """The shape of one input."""
    if isinstance(size, Tensor) or not isinstance(size, int | Sequence):
        shown = f"a tensor {list(size.shape)}" if isinstance(size, Tensor) else repr(size)
        raise UsageError(f"size is {shown}: give a side, (height, width), or the shape of one input without its batch")
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    shape = (channels, *sizes) if len(sizes) == 2 else sizes
    if not shape or not all(type(one) is int and one >= 1 for one in shape):
        raise UsageError(f"size {size}, channels {channels}: must be whole numbers of at least 1")
    return shape


def _check_parts(name: str, module: nn.Module) -> None:
    """SwinQuantError for a scripted part, a parameter that is not made yet or of another float type, and complex
    numbers, which no checkpoint holds."""
    for key, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise SwinQuantError(f"{name}: {key or 'it'} is scripted: give the module that torch.jit.script was given")
    for key, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise SwinQuantError(f"{name}: {key} is not initialized: call the module once on an example")
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            raise SwinQuantError(f"{name}: {key} is {str(parameter.dtype).removeprefix('torch.')}: give module.float()")
    for key, value in module.state_dict().items():
        if isinstance(value, Tensor) and value.dtype.is_complex:
            remedy = "keep torch.view_as_real of it, and read it by torch.view_as_complex"
            raise SwinQuantError(f"{name}: {key} holds complex numbers, which no checkpoint does: {remedy}")


def _check_outputs(
    wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor | None], again: Mapping[str, Tensor | None], name: str
) -> None:
    """SwinQuantError where an output is not finite, has not one part for each example, or is another one in a second
    call on the same input."""
    for key, tensor in wanted.items():
        if not tensor.isfinite().all():
            raise SwinQuantError(f"{name}: gives NaN or infinity ({key}) for a picture of random values")
        if tensor.dim() < 1 or len(tensor) != _EXAMPLES:
            fit = [key for key, one in tensors.items() if one is not None and one.dim() and len(one) == _EXAMPLES]
            remedy = f"choose others by ‹output›: {listed(fit, 8)}" if fit else "wrap the part before it"
            what = f"gives {key} {list(tensor.shape)} for {_EXAMPLES} inputs, not one each"
            raise SwinQuantError(f"{name}: {what}: {remedy}")
        other = again.get(key)
        if other is None or other.shape != tensor.shape or (other - tensor).abs().max() > _CLOSE * tensor.abs().max():
            raise SwinQuantError(
                f"{name}: gives another {key} when it is called again: it keeps a state, or draws random numbers, as "
                "dropout does: neither is supported"
            )


def _named(output: object) -> dict[str, Tensor | None]:
    """The tensors in a module's output by name, in the order of torch's tree; None for any other value."""
    leaves, _ = _pytree.tree_flatten_with_path(output)
    found: dict[str, Tensor | None] = {}
    for path, leaf in leaves:
        words = (str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
        found[".".join(words) or "output"] = leaf if isinstance(leaf, Tensor) else None
    return found


def _chosen(tensors: Mapping[str, Tensor | None], output: str | Sequence[str] | None, name: str) -> dict[str, Tensor]:
    """The compared and exported tensors."""
    there = {key: tensor for key, tensor in tensors.items() if tensor is not None and tensor.is_floating_point()}
    if not there:
        raise SwinQuantError(f"{name}: gives no tensor of float numbers: {listed(list(tensors)) or 'nothing'}")
    asked = [output] if isinstance(output, str) else output or ([LOGITS] if LOGITS in there else list(there))
    matches = {one: [key for key in there if key == one or key.startswith(f"{one}.")] for one in asked}
    if strange := [one for one, found in matches.items() if not found]:
        raise UsageError(f"‹output› {strange[0]}: {name} gives {listed(list(there), 8)}: choose one of them")
    chosen = {key for found in matches.values() for key in found}
    return {key: tensor for key, tensor in there.items() if key in chosen}
