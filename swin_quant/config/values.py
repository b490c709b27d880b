"""Write values into the tree: every key known, every value of its key's type, nothing ever evaluated.

yacs would evaluate text, and accept None for any key; here text is read as the type of its key.
"""

from collections.abc import Iterator, Mapping
from functools import cache, reduce
from operator import getitem
from types import GenericAlias
from typing import Annotated, Any

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError, did_you_mean
from swin_quant.base.schema import Must, checked, show
from swin_quant.config.defaults import defaults, families
from swin_quant.config.sides import shortest

# A value of the key's type, for defaults that do not show it.
_EXAMPLES: dict[str, Any] = {
    "AUG.CUTMIX_MINMAX": (0.0, 1.0),
    "MODEL.FEATURES.STAGES": [0],
    "TRAIN.LR_SCHEDULER.MULTISTEPS": [0],
}
_OPTIONAL = ("AUG.CUTMIX_MINMAX", "AUG.AUTO_AUGMENT")
_SIZE = "DATA.IMG_SIZE"
_Text = Annotated[str, Must(lambda text: "\0" not in text, "without NUL")]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that is not a section."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@cache
def _keys(known: tuple[str, ...]) -> tuple[dict[str, Any], set[str]]:
    """Every key of the tree with its type, and the names of sections, among them those of the `known` families."""
    optional = {
        f"MODEL.{families()[name].section}.{key}": v for name in known for key, v in families()[name].optional.items()
    }
    examples = dict(leaves(defaults())) | _EXAMPLES | optional
    types = {key: _kind(value) for key, value in examples.items()} | {_SIZE: int | list[int]}
    types |= {key: types[key] | None for key in (*_OPTIONAL, *optional)}
    return types, {key.rsplit(".", n)[0] for key in types for n in range(1, key.count(".") + 1)}


def _kind(example: Any) -> Any:
    """The annotation of values like this one."""
    if isinstance(example, list | tuple):
        entry = _kind(example[0])
        return GenericAlias(list, entry) if isinstance(example, list) else GenericAlias(tuple, (entry,) * len(example))
    return _Text if isinstance(example, str) else type(example)


def value_at(cfg: CfgNode, place: str) -> Any:
    """The value of a dotted key."""
    return reduce(getitem, place.split("."), cfg)


def merge(cfg: CfgNode, tree: Mapping[Any, Any], source: str, prefix: str = "") -> None:
    """Write `tree` into `cfg`: nested sections or dotted keys, every key known and every value of its key's type."""
    types, known_sections = _keys(tuple(families()))
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in known_sections and isinstance(value, Mapping):
            merge(cfg, value, source, f"{key}.")
        elif key in known_sections:
            raise UsageError(f"{source}: {key} is a section of keys, not {show(value)}")
        elif key == "BASE" and isinstance(value, list) and not any(value):
            continue
        elif key == "BASE":
            raise UsageError(f"{source}: BASE works only in a YAML file")
        elif key not in types:
            hint = did_you_mean(key.upper(), [*types, *sorted(known_sections)])
            raise UsageError(f"{source}: unknown key {show(key)[1:-1]}{hint}")
        else:
            *sections, leaf = key.split(".")
            found = checked(types[key], value, source, key, text=True, error=UsageError)
            reduce(getitem, sections, cfg)[leaf] = shortest(found) if key == _SIZE else found
