"""Files of pictures: the bytes of a format, and an archive with its map of labels."""

import io
import zipfile
from pathlib import Path

from PIL import Image


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def zipped(root: Path, members: dict[str, bytes], lines: str | bytes | None = None, split: str = "val") -> Path:
    """Write `<split>.zip` and its map into the folder, which is returned; without `lines` labels count from 0."""
    with zipfile.ZipFile(root / f"{split}.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    lines = "".join(f"{name}\t{label}\n" for label, name in enumerate(members)) if lines is None else lines
    (root / f"{split}_map.txt").write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    return root
