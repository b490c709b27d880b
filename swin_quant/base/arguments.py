"""Notes in a signature for the command line that is generated from it: the notes of cyclopts, and `Fields`."""

from dataclasses import dataclass

from cyclopts import Parameter as Parameter


@dataclass(frozen=True)
class Fields:
    """The argument is given on the command line as the fields of a dataclass, a flag each.

    `calibrate(model: Annotated[Model | Path | ModelFile, Fields(ModelFile)])` takes any of the three in Python; the
    command has the flags `--cfg`, `--weights` and the rest of `ModelFile`, and calls it with a `ModelFile`.

    Args:
        kind: The dataclass. Its docstring has the help of the flags, under `Args:`.
        title: The title above the flags in `--help`.
        positional: The fields that may also be given without a flag, in this order.
        without: The fields that have no flag here.
    """

    kind: type
    title: str
    positional: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
