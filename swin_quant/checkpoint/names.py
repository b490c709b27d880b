"""One convention of names inside the house, Microsoft's (docs/reference, section 1.2); others are renamed.

timm's patch merging concatenates the four neighbours in Microsoft's order, (0,0), (1,0), (0,1), (1,1), and its V2
keeps `q_bias` and `v_bias` apart as Microsoft does: no tensor is changed, only names. Those of transformers are in
a file of their own.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from swin_quant.base.errors import SwinQuantError
from swin_quant.checkpoint import mindspore
from swin_quant.checkpoint.transformers_names import NAME, from_transformers, uses_transformers_names
from swin_quant.config.families import families


@dataclass(frozen=True)
class Convention:
    """A way of naming, in use when a key matches `seen` and none matches `unseen`; `pattern` -> `to` undoes it."""

    name: str
    seen: str
    pattern: str
    to: str | Callable[[re.Match[str]], str]
    unseen: str = r"(?!)"

    def used_by(self, keys: Iterable[str]) -> bool:
        """Whether `keys` are named this way."""
        keys = list(keys)
        return any(re.search(self.seen, key) for key in keys) and not any(re.search(self.unseen, key) for key in keys)


_INSERTED = re.compile(r"(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
WRAPPERS = tuple(  # in any order and depth
    Convention(name, rf"^{word}\.", rf"^{word}\.", "", unseen=rf"^(?!{word}\.)")
    for name, word in (
        ("DistributedDataParallel", "module"),
        ("torch.compile", "_orig_mod"),
        ("Lightning", "model"),
        ("a wrapper's", "(net|network|ema|model_ema|ema_model|student|teacher)"),
    )
)
CONVENTIONS = (
    Convention("timm features", r"^layers_0\.", r"^layers_(\d+)\.", lambda match: f"layers.{match[1]}."),
    Convention("SimMIM", r"\.attn\.rpe_mlp\.", r"\.attn\.rpe_mlp\.", ".attn.cpb_mlp."),
    Convention(  # of a Swin alone: the heads of timm's other models are called so in the house, too
        "timm",
        r"^head\.fc\.",
        r"^head\.fc\.",
        "head.",
        unseen=r"^(?!(head|layers|patch_embed|norm|absolute_pos_embed)\b)",
    ),
    Convention(  # Microsoft ends stage i with its downsample, newer timm begins stage i + 1 with it
        "timm",
        r"^layers\.[1-9]\d*\.downsample\.",
        r"^layers\.(\d+)\.downsample\.",
        lambda match: f"layers.{int(match[1]) - 1}.downsample.",
        unseen=r"^layers\.0\.downsample\.",
    ),
)


def without_inserted(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` without the names that torch puts into keys where it wraps a part of a model."""
    names = [_INSERTED.sub("", key) for key in state]
    return dict(zip(names, state.values(), strict=True)) if len({*names}) == len(names) else state


def to_microsoft(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """`state` under Microsoft's names, and the names of the conventions that were undone ("microsoft" if none).

    A key that no convention knows is left alone. Two keys that would become one are an error.
    """
    found: list[str] = []
    while used := [wrapper for wrapper in WRAPPERS if wrapper.used_by(state)]:
        found += [wrapper.name for wrapper in used]
        state = _renamed(state, used[0])
    for convention in CONVENTIONS:
        if convention.used_by(state):
            found.append(convention.name)
            state = _renamed(state, convention)
    if uses_transformers_names(state):
        found.append(NAME)
        state = from_transformers(state)
    if mindspore.is_mindspore(state):
        found.append(mindspore.NAME)
        state = mindspore.from_mindspore(state)
    for family in families().values():
        if family.rename:
            state, undone = family.rename(state)
            found += undone
    return state, " + ".join(dict.fromkeys(found)) or "microsoft"


def _renamed(state: dict[str, Tensor], convention: Convention) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for key, tensor in state.items():
        new = re.sub(convention.pattern, convention.to, key)
        if new in renamed:
            raise SwinQuantError(f"two keys of the checkpoint become {new} without {convention.name}'s names")
        renamed[new] = tensor
    return renamed
