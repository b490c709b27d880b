"""Watch modules while a network computes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

Visit = Callable[[str, nn.Module, tuple[Any, ...], Any], None]


@contextmanager
def watching(modules: Mapping[str, nn.Module], visit: Visit) -> Iterator[None]:
    """Inside the context, `visit(name, module, inputs, output)` is called after each forward pass of the modules.

    Its result is ignored; its exceptions end the forward pass.
    """
    hooks = [module.register_forward_hook(partial(_call, visit, name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _call(visit: Visit, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    visit(name, module, inputs, output)
