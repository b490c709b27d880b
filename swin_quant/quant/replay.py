"""Run a network from the middle on: parts before it replay their recorded outputs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from swin_quant.quant.watch import watching


@contextmanager
def recorded(parts: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """The outputs of `parts`, which run one after another, in a forward inside."""
    outputs: list[Tensor] = []
    with watching({str(number): part for number, part in enumerate(parts)}, lambda *seen: outputs.append(seen[-1])):
        yield outputs


@contextmanager
def replayed(parts: Sequence[nn.Module], outputs: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the first `len(outputs)` of `parts` return `outputs` for any input.

    Modules between them compute as usual, from the output of the part before.
    """
    skipped = list(zip(parts, outputs, strict=False))
    for part, output in skipped:
        part.forward = lambda *given, _output=output: _output
    try:
        yield
    finally:
        for part, _ in skipped:
            del part.forward
