"""A page of results, made of sections that several runs write: each replaces that of its title."""

import re
from pathlib import Path

from swin_quant.base.files import atomic_write_bytes
from swin_quant.cards.versions import versions


def place(page: Path, heading: str, title: str, text: str) -> None:
    """Put a section under `## title` into the page; sections stand by title."""
    old = page.read_text() if page.exists() else ""
    sections = {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in re.split(r"(?m)^## ", old)[1:]}
    sections[title] = text.strip()
    found = "".join(f"\n## {name}\n\n{body}\n" for name, body in sorted(sections.items()))
    atomic_write_bytes(page, (heading + found).encode())


def cpu() -> str:
    """The name of this CPU: times of two are two sections."""
    return str(versions().get("cpu") or "an unknown CPU")
