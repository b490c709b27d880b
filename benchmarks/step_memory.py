"""The memory of a training step, counted: weights, gradients, optimizer state, and autograd's saved tensors.

Every storage counts once. The count is exact and holds for any device; under torch's `FakeTensorMode`, where tensors
have shapes and no values, it takes seconds for models of any size. It is the memory at the end of the forward pass,
without the temporaries of single operations and the allocator's slack.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from swin_quant.models.classifier import Classifier
from swin_quant.models.registry import blocks_of
from swin_quant.quant.watch import watching

ADAM_STATES = 2  # float32 moments for every weight


@dataclass
class Storages:
    """A set of storages by address; it holds their tensors, since a freed address could be used again."""

    sizes: dict[int, int] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.sizes[storage._cdata] = storage.nbytes()
        self.held.append(tensor.detach())

    def nbytes(self, without: Iterable[Tensor] = ()) -> int:
        """Bytes of all storages, except those of some tensors."""
        known = {tensor.untyped_storage()._cdata for tensor in without}
        return sum(size for address, size in self.sizes.items() if address not in known)


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd saves in `forward()` for its backward pass, without the weights and buffers of `model`."""
    kept = Storages()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    del result
    return kept.nbytes(without=[*model.parameters(), *model.buffers()])


def checkpointed_bytes(model: Classifier, forward: Callable[[], Tensor]) -> int:
    """`saved_bytes` with activation checkpointing: the inputs of all blocks, and all saved tensors of the largest
    block.

    Modules between blocks (embedding, merging, head) are left out; they are a few hundredths.
    """
    inputs, most = Storages(), 0

    def measure(name: str, block: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
        nonlocal most
        inputs.add(arguments[0])
        most = max(most, saved_bytes(block, lambda: type(block).forward(block, *arguments)))

    with watching(blocks_of(model), measure):
        forward()
    return inputs.nbytes() + most


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bytes of weights and buffers, of a gradient for every trainable weight, and of the optimizer's state.

    Without an optimizer, AdamW's state: two float32 moments of every trainable weight.
    """
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None:
        states = ADAM_STATES * 4 * sum(parameter.numel() for parameter in trained)
    else:
        values = [value for state in optimizer.state.values() for value in state.values()]
        states = sum(value.nbytes for value in values if isinstance(value, Tensor))
    return weights + sum(parameter.nbytes for parameter in trained) + states
