"""A hook of mkdocs: pages for README and other files outside of docs/, --help of all commands, the Python API, and
tables of results from their CSV.

Links that leave docs/ lead to those pages; links to files that the site lacks become text. The documents themselves do
not change.
"""

import csv
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from swin_quant import _FACE
from swin_quant.cli.command import Command
from swin_quant.cli.commands import COMMANDS

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")

_TABLE = re.compile(r"^Table: \[(\S+\.csv)\]\(\1\)(: | of )(.+)\.$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    root = os.path.dirname(config.config_file_path)
    for source, page in PAGES.items():
        with open(os.path.join(root, source), encoding="utf-8") as file:
            files.append(File.generated(config, page, content=with_links(file.read(), "", "")))
    files.append(File.generated(config, "commands.md", content=commands()))
    files.append(File.generated(config, "api.md", content=api(_FACE)))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Change only a document's links out of docs/, and put tables below the lines that name their CSV."""
    source = page.file.src_uri
    if source in (*PAGES.values(), "commands.md", "api.md"):
        return markdown
    folder = os.path.join(config.docs_dir, os.path.dirname(source))
    markdown = _TABLE.sub(lambda found: _rendered(folder, *found.groups()), markdown)
    return with_links(markdown, str(PurePosixPath("docs", source).parent), str(PurePosixPath(source).parent))


def with_links(text: str, folder: str, place: str) -> str:
    """Links of a document in `folder` of the repository, rewritten for a page at `place` of the site."""

    def link(found: re.Match[str]) -> str:
        image, title, target, anchor = found[1], found[2], found[3], found[4] or ""
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        path = os.path.normpath(os.path.join(folder, target))
        if path in PAGES:
            path = os.path.join("docs", PAGES[path])
        if path.startswith("docs" + os.sep) and os.path.splitext(path)[1]:
            return f"{image}[{title}]({os.path.relpath(path[5:], place or '.')}{anchor})"
        index = os.path.join(path, "README.md")
        if path.startswith("docs") and os.path.isfile(index):
            return f"[{title}]({os.path.relpath(index[5:], place or '.')}{anchor})"
        return title if title.startswith("`") or "/" not in path else f"{title} (`{path}`)"

    return _LINK.sub(link, text)


def _rendered(folder: str, name: str, kind: str, named: str) -> str:
    with open(os.path.join(folder, name), encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    shown = render_columns(rows, named.split(", ")) if kind == ": " else render_table(rows, named)
    return f"Rendered from [{name}]({name}):\n\n{shown}"


def render_columns(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> str:
    """The named columns as Markdown, figures with two decimals; `x` has the error in `x_se` behind it."""
    return _markdown(columns, ([_cell(row, column) for column in columns] for row in rows))


def render_table(rows: Sequence[Mapping[str, str]], name: str) -> str:
    """The rows whose `table` is that name as Markdown, as they stand, without columns that are empty there."""
    these = [row for row in rows if row["table"] == name]
    columns = [key for key in rows[0] if key != "table" and any(row[key] for row in these)]
    return _markdown(columns, ([row[column].replace("|", "\\|") for column in columns] for row in these))


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))


def _cell(row: Mapping[str, str], column: str) -> str:
    text, error = row[column], row.get(f"{column}_se")
    try:
        text = text if text.isdigit() else f"{float(text):.2f}"
    except ValueError:
        return text
    return f"{text} ±{float(error):.2f}" if error else text


def commands() -> str:
    """The --help of every command."""
    parts = ["# Commands\n"]
    for name, what in COMMANDS.items():
        help_text = Command(name).help(100)
        parts.append(f"## swin-quant {name}\n\n{what}\n\n```text\n{help_text}```\n")
    return "\n".join(parts)


def api(face: Mapping[str, str]) -> str:
    """The names in `import swin_quant as sq`."""
    parts = ["# Python\n", "All of it is had by `import swin_quant as sq`.\n"]
    parts += [f"## sq.{name}\n\n::: {module}.{name}\n" for name, module in face.items()]
    return "\n".join(parts)
