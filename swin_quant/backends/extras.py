"""Optional libraries, imported when they are needed."""

import importlib
from types import ModuleType

from swin_quant.errors import UsageError


def library(name: str, extra: str) -> ModuleType:
    """The module `name`, which comes with the package's `extra`. UsageError says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} cannot be imported ({error}): pip install 'swin-quant[{extra}]'") from error
