"""Optional libraries, imported when they are needed."""

import importlib
from types import ModuleType

from swin_quant.base.errors import UsageError


def installing(extra: str) -> str:
    """The command that installs one of pyproject.toml's extras. The package is on no index: it works in a checkout."""
    return f"pip install -c constraints.txt -e '.[{extra}]' in the checkout"


def library(name: str, extra: str) -> ModuleType:
    """The module `name`, which comes with the package's `extra`. UsageError says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} cannot be imported ({error}): {installing(extra)}") from error
