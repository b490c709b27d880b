"""Flags that take several words: they may be repeated, and they end where a file begins that is given by its place.

`--policy a b FILE` and `--policy a --policy b FILE` mean the same.
"""

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

_MODELS = (".pth", ".pt", ".safetensors", ".ckpt", ".bin", ".onnx", ".engine", ".ts", ".cuda", ".json")
_HUBS = ("timm:", "hf:")
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # which argparse takes for a word


class Store(argparse._StoreAction):
    """As argparse's, but that a flag of several words adds to what it was given before."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        before = getattr(namespace, self.dest, self.default)
        if flag and self.nargs == "+" and before is not self.default:
            values = [*before, *values]
        super().__call__(parser, namespace, values, flag)


def apart(arguments: Sequence[str], actions: Sequence[argparse.Action]) -> list[str]:
    """The arguments, with each word of a flag of several words behind that flag: `--policy=a --policy=b FILE`.

    Nothing is changed for a parser that takes nothing by its place.
    """
    if all(action.option_strings for action in actions):
        return list(arguments)
    several = {flag: action for action in actions if action.nargs == "+" for flag in action.option_strings}
    found: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*found, word, *rest]
        words = list(_words(several[word], rest)) if word in several else []
        found += [f"{word}={one}" for one in words] or [word]
        del rest[: len(words)]
    return found


def _words(action: argparse.Action, rest: Sequence[str]) -> Iterator[str]:
    for number, word in enumerate(rest):
        is_flag = word.startswith("-") and word != "-" and " " not in word and not _NUMBER.fullmatch(word)
        if is_flag or (number and _ends(str(action.metavar), number, word)):
            return
        yield word


def _ends(metavar: str, number: int, word: str) -> bool:
    """Whether a word behind the first of a flag is a file of its own: by its ending, or because it is there."""
    if metavar == "KEY VALUE" and number % 2 or "=" in metavar and "=" in word:
        return False
    if word.endswith(_MODELS) or word.startswith(_HUBS):
        return True
    takes_files = metavar in ("FILE", "PLACE") or "FILE" in metavar and word.endswith((".yaml", ".yml"))
    return not takes_files and os.path.exists(word) and (os.path.isfile(word) or os.sep in word)
