"""The type of what is not int8: an engine chooses it or has one, or the file is exported in it."""

from collections.abc import Sequence

from swin_quant.backends.backend import Backend, function
from swin_quant.base.errors import UsageError
from swin_quant.tasks.export import exporter_options


def told_exporter(target: Backend, engine: Backend | None, float_type: str | None) -> dict[str, str]:
    """What the exporter of `target` is told of it, for what it writes to run so on `engine`; None: on none here.

    Nothing where that is up to the engine. UsageError for a type that neither has.
    """
    runs = engine or target
    if float_type is None or (runs.float_types and not runs.is_installed):
        return {}
    able = _able(runs)
    if not able:
        told = {"float_type": float_type}
        exporter_options(target, "int8", told)
        return told
    if float_type not in able:
        raise UsageError(f"‹float_type› {float_type}: {runs.name} runs what is not int8 in {' or '.join(able)} here")
    return {}


def _able(engine: Backend) -> Sequence[str]:
    """The types that an engine can run whatever it was exported in; none where that says it."""
    if engine.float_types:
        found: list[str] = function(engine.float_types)()
        return found
    return [engine.only_float_type] if engine.only_float_type else []
