"""Find the files that come with the package."""

from pathlib import Path


def configs_dir() -> Path:
    """The folder of the shipped configurations: inside an installed wheel, beside the package in a checkout."""
    return _shipped("configs")


def plugins_dir(library: str) -> Path:
    """The folder of the C++ sources of the operators for `library`."""
    return _shipped("plugins") / library


def _shipped(folder: str) -> Path:
    package = Path(__file__).resolve().parents[1]
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


def shipped_files(kind: str) -> list[Path]:
    """The shipped files of a kind (`policies`, `recipes`), in the order of their names."""
    return sorted((configs_dir() / kind).glob("*.yaml"), key=lambda path: path.stem)
