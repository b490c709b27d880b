"""The interface of every source of pictures, the request for a split of one, and the one decoder from a file to RGB."""

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import cast

import numpy as np
from PIL import Image, ImageOps

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import near, open_plain, reason

# Only these decoders see the bytes; files with other extensions are left out. All of them tell a picture's size before
# they allocate memory for it. PIL's other decoders run programs (EPS, WMF), unpack nested files at once (ICO, ICNS,
# FITS, IPTC), work for minutes or take gigabytes on a few bytes (DDS, BLP, XPM, JPEG 2000), or have no defined white.
FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "BMP": (".bmp",),
    "DIB": (".dib",),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "AVIF": (".avif", ".avifs"),
    "TGA": (".tga", ".icb", ".vda", ".vst"),
    "CUR": (".cur",),
    "PCX": (".pcx",),
    "PSD": (".psd",),
    "QOI": (".qoi",),
    "SGI": (".sgi", ".rgb", ".rgba", ".bw"),
    "SUN": (".ras",),
    "XBM": (".xbm",),
}
EXTENSIONS = tuple(extension for extensions in FORMATS.values() for extension in extensions)

MAX_BYTES = 64 << 20  # for a file, or an unpacked zip member
MAX_PIXELS = 2**26  # PIL takes 4 bytes a pixel of any colour, and converting copies once: 512 MiB
MAX_SCANNED = 2**31  # pixels times scans: a progressive JPEG may have any number of scans
_READS = 2**13  # reads of a file before its pixels, and 8 more a kilobyte in a PNG: a hundred take PIL a millisecond
_STRIP = 2**20  # pixels converted at a time
_SCAN = b"\xff\xda"  # the marker of a scan, which compressed data cannot hold (ITU-T T.81, B.1.1.5)
MAX_ASPECT = 100  # a 1 x 60000 picture would be 256 x 15 million once its shorter side is resized


class UnreadablePicture(SwinQuantError):
    """One picture cannot be read or decoded: it is left out and counted, and the run goes on."""


class TooLargePicture(ValueError):
    """A picture has more pixels than are decoded."""


class Pictures(ABC):
    """A fixed, ordered set of pictures.

    Attributes:
        names: one stable name a picture: relative, with `/`, and printable. Hashed into the run card.
        labels: one class index a picture; -1 without a label.
        class_names: the classes in label order.
        upright: whether to turn pictures as their EXIF says, whatever the reader says; None: as the reader says.
    """

    upright: bool | None = None
    names: Sequence[str]
    labels: Sequence[int]
    class_names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    def open(self, index: int) -> bytes | Image.Image:
        """Return the encoded file, or the picture if the source has no files. Raises UnreadablePicture."""

    def read(self, index: int, upright: bool = False) -> Image.Image:
        """Return picture `index` in RGB; `upright` as in `decode`. Raises UnreadablePicture."""
        return decode(self.open(index), self.names[index], upright if self.upright is None else self.upright)

    def flaw(self, index: int) -> str | None:
        """The reason why picture `index` cannot be read; None if it can."""
        try:
            self.read(index)
        except UnreadablePicture as error:
            return str(error)
        return None


class SomePictures(Pictures):
    """The pictures at `indices` of other Pictures, in that order."""

    def __init__(self, whole: Pictures, indices: Sequence[int]) -> None:
        self.whole, self.indices = whole, indices
        self.names = [whole.names[index] for index in indices]
        self.labels = [whole.labels[index] for index in indices]
        self.class_names, self.upright = whole.class_names, whole.upright

    def open(self, index: int) -> bytes | Image.Image:
        return self.whole.open(self.indices[index])


def read_bytes(name: str, path: Path, start: int = 0, size: int | None = None) -> bytes:
    """The bytes of the picture `name`: `size` of a file from `start` on, or the whole file.

    Raises UnreadablePicture, also for a special file, and for over 64 MiB.
    """
    try:
        with open_plain(path) as file:
            file.seek(start)
            data = file.read(MAX_BYTES + 1 if size is None else min(size, MAX_BYTES + 1))
    except FileNotFoundError as error:
        raise UnreadablePicture(f"{name}: no such picture{near(path)}") from error
    except OSError as error:
        raise UnreadablePicture(f"{name}: {reason(error)}") from error
    if len(data) > MAX_BYTES:
        raise UnreadablePicture(f"{name}: larger than {MAX_BYTES >> 20} MiB")
    if size is not None and len(data) < size:
        raise UnreadablePicture(f"{name}: {path} is shorter than it was")
    return data


def is_picture(name: str) -> bool:
    """Whether a file's extension, in any case, is that of a picture."""
    return name.lower().endswith(EXTENSIONS)


def printable(name: str) -> str:
    """Escape names that would break a one-line message: control characters, bytes that are not UTF-8."""
    return name if name.isprintable() else name.encode("unicode_escape").decode("ascii")


def decode(data: bytes | Image.Image, name: str, upright: bool = False) -> Image.Image:
    """Decode the first frame of a picture into 8-bit RGB.

    Transparency is dropped and EXIF orientation ignored, as by `Image.open(f).convert("RGB")`, with which published
    accuracies are measured; `upright` turns the picture as its EXIF says. 16-bit greyscale is scaled, where PIL's own
    conversion would clip it to white. 32-bit integers have no defined white: values up to 255 count as 8-bit samples,
    values up to 65535 as 16-bit ones.

    Raises:
        UnreadablePicture: with `name` and the reason, for any fault of the data.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's warnings about metadata; its bomb limit is checked below
            return _rgb(data if isinstance(data, Image.Image) else opened(data), upright)
    except Exception as error:  # PIL raises a dozen unrelated types on damaged files
        is_damaged = isinstance(error, OSError | SyntaxError | EOFError)  # as PIL says it; our own refusals are others
        remedy = ": the picture is damaged or cut off: replace it or leave it out" if is_damaged else ""
        raise UnreadablePicture(f"{name}: {' '.join(str(error).split()) or type(error).__name__}{remedy}") from error


class _File(BytesIO):
    """A file with a limited number of reads: PIL would take minutes for millions of empty parts."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.left = _READS

    def read(self, size: int | None = -1) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise _TooManyParts("it is made of too many parts")
        return super().read(size)


class _TooManyParts(Exception):
    """Raised past the limit. PIL takes it neither for another format nor for a damaged end."""


def count_scans(image: Image.Image, data: bytes) -> int:
    """The most times that a decoder goes over a picture's pixels."""
    is_jpeg = image.format in ("JPEG", "MPO") or "jpeg" in str(image.info.get("compression"))  # in a TIFF
    return max(1, data.count(_SCAN)) if is_jpeg else 1


def opened(data: bytes) -> Image.Image:
    """The picture with only its header read. Raises PIL's errors, or a ValueError."""
    if not data:
        raise ValueError("empty file")
    try:
        file = _File(data)
        image = Image.open(file, formats=tuple(FORMATS))
        file.left += len(data) // 128 if image.format == "PNG" else len(data) * _READS
    except Image.DecompressionBombError as error:  # whose message is for programmers
        raise TooLargePicture(f"more than {MAX_PIXELS:,} pixels: make it smaller") from error
    except Image.UnidentifiedImageError as error:  # its message shows the BytesIO's address
        raise ValueError("not a picture in a known format") from error
    if (scans := count_scans(image, data)) * image.width * image.height > MAX_SCANNED:
        size = f"{scans} scans of {image.width} x {image.height} pixels"
        raise TooLargePicture(f"{size}: make it smaller, or save it without progressive scans")
    return image


def _rgb(image: Image.Image, upright: bool) -> Image.Image:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise TooLargePicture(f"{width} x {height} pixels, more than {MAX_PIXELS:,}: make it smaller")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ValueError(f"{width} x {height} pixels: one side is more than {MAX_ASPECT} times the other")
    if image.mode == "F":
        raise ValueError("floating-point samples have no defined white")
    image.load()
    says_white = image.mode != "I" or image.format in ("PNG", "PPM")
    if upright:
        with contextlib.suppress(Exception):  # damaged metadata must not lose the picture
            image = ImageOps.exif_transpose(image)
    least, most = (0, 256) if says_white else cast("tuple[int, int]", image.getextrema())  # for one channel
    if 0 <= least and most <= 255:
        image = image.convert("L")
    elif image.mode.startswith("I"):
        image = _eight_bits(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit greyscale in 8 bits, a strip at a time: intermediate numbers take 8 bytes a pixel."""
    width, height = image.size
    rows, scaled = max(1, _STRIP // width), Image.new("L", image.size)
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(top + rows, height)))
        samples = np.asarray(strip).astype(np.int64)  # some formats hold 16-bit samples in mode I
        if samples.min() < 0 or samples.max() > 65535:
            raise ValueError("32-bit samples have no defined white")
        scaled.paste(Image.fromarray(((samples + 128) // 257).astype(np.uint8)), (0, top))
    return scaled
