"""A picture in a body: what decoding it costs, by its header, and decoding it, here or in a process of its own."""

import mmap
import os
import sys
import warnings
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE, Popen
from tempfile import TemporaryFile

from PIL import Image
from torch import Tensor

from swin_quant.data.pictures import UnreadablePicture, decode, opened, scans_of
from swin_quant.data.preprocess import Preprocess
from swin_quant.serving.apart import UNREADABLE, UPRIGHT, reason
from swin_quant.serving.limits import Refused

SMALL = 2**24  # bytes that decoding most pictures does not need
_LIGHT = 2**24  # pixels, those of every scan: a few tenths of a second
_LOCKED_LIGHT = 2**20  # of a format whose decoder keeps the interpreter's lock, so that nobody is answered meanwhile
_IN_PYTHON = 16  # times the work: a decoder that is written in it, of a BMP in runs, for instance
_UNLOCKED = ("JPEG", "MPO", "PNG", "PPM", "BMP", "TIFF", "GIF")


@dataclass(frozen=True)
class Cost:
    """`work`: pixels, those of every scan; the bytes that decoding `needs`; whether it `is_light`."""

    work: int
    needs: int
    is_light: bool


def cost_of(body: bytes, most: float, upright: bool) -> Cost:
    """What the header of a picture says. Refused where there is none, and for more than `most` megapixels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = opened(body)
            tiles = getattr(image, "tile", ())
            scans = scans_of(image, body) * (_IN_PYTHON if tiles and tiles[0][0] in Image.DECODERS else 1)
    except Exception as error:
        raise Refused(400, reason(error)) from error
    pixels, is_unlocked = image.width * image.height, image.format in _UNLOCKED
    if pixels * scans > most * 1e6:
        raise Refused(413, f"{image.width} x {image.height} pixels, times {scans}: more than {most:g} megapixels")
    # PIL's four bytes a pixel, those of a copy turned or in RGB, a JPEG's coefficients, what a library keeps besides.
    each = 4 + 4 * (upright or image.mode != "RGB") + 2 * len(image.getbands()) * (scans > 1) + 12 * (not is_unlocked)
    is_light = pixels * scans <= (_LIGHT if is_unlocked else _LOCKED_LIGHT)
    return Cost(pixels * scans, pixels * (each if is_light else each + 3), is_light)


def begun(body: bytes, most: float, preprocess: Preprocess) -> Tensor | Cost:
    """As `prepared` for a picture that needs no more than SMALL bytes, and what others cost."""
    cost = cost_of(body, most, preprocess.upright)
    return prepared(body, preprocess) if cost.is_light and cost.needs <= SMALL else cost


def prepared(body: bytes, preprocess: Preprocess) -> Tensor:
    """The picture as the model takes it: float32 [1, 3, S, S]. Refused where it cannot be read."""
    try:
        return preprocess(decode(body, "the body", preprocess.upright))[None]
    except UnreadablePicture as error:
        raise Refused(400, reason(error.__cause__)) from error


class DecodedApart:
    """Decoding in a process of its own: it keeps nobody's lock, and `stop` ends it at any moment."""

    def __init__(self, body: bytes, preprocess: Preprocess) -> None:
        self.body, self.preprocess = body, preprocess
        self.process: Popen[bytes] | None = None
        self.is_stopped = False

    def __call__(self) -> Tensor:
        """As `prepared`, bit by bit."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "swin_quant.serving.apart", *[UPRIGHT] * self.preprocess.upright]
        with TemporaryFile() as file:
            with Popen(command, stdin=PIPE, stdout=file, stderr=DEVNULL, env=environment,
                       start_new_session=True) as self.process:  # fmt: skip
                if self.is_stopped:
                    self.process.kill()
                self.process.communicate(self.body)
            file.seek(0)
            said = file.readline(1000).decode()
            if self.process.returncode != 0:
                raise Refused(400, said or UNREADABLE)
            width, height = map(int, said.split())
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as whole:
                with whole[file.tell() :] as pixels:
                    image = Image.frombytes("RGB", (width, height), pixels)
        return self.preprocess(image)[None]

    def stop(self) -> None:
        self.is_stopped = True
        if self.process:
            self.process.kill()
