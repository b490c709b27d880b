"""A picture in a body: the cost of decoding it, by its header, and decoding it, here or in another process."""

import mmap
import os
import sys
import warnings
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE, Popen
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any

from PIL import Image
from torch import Tensor

from swin_quant.data.pictures import UnreadablePicture, decode, opened, scans_of
from swin_quant.data.preprocess import Preprocess
from swin_quant.serving.limits import Refused

UNREADABLE = "the body: not a picture that can be read"
UPRIGHT = "upright"  # the argument that turns the picture as its EXIF says
_NICE = 10  # requests with small pictures have the processors first
_ROWS = 256  # written at a time


def main() -> int:
    """0, or 1 with the fault of the picture on standard output."""
    os.nice(_NICE)
    out = sys.stdout.buffer
    try:
        image = decode(sys.stdin.buffer.read(), "the body", UPRIGHT in sys.argv[1:])
    except UnreadablePicture as error:
        out.write(reason(error.__cause__).encode())
        return 1
    width, height = image.size
    out.write(b"%d %d\n" % (width, height))
    for top in range(0, height, _ROWS):
        out.write(image.crop((0, top, width, min(top + _ROWS, height))).tobytes())
    out.flush()
    return 0


def reason(error: BaseException | None) -> str:
    """The message of an error for a client: our own words, or that there is an error; never a library's words."""
    trace: TracebackType | None = error.__traceback__ if error else None
    while trace and trace.tb_next:
        trace = trace.tb_next
    is_ours = trace and (__package__ or "").split(".")[0] == str(trace.tb_frame.f_globals.get("__name__")).split(".")[0]
    return f"the body: {error}" if is_ours else UNREADABLE


if __name__ == "__main__":
    sys.exit(main())


SMALL = 2**24  # bytes; decoding most pictures needs fewer
_LIGHT = 2**24  # pixels over all scans: a few tenths of a second
_LOCKED_LIGHT = 2**20  # the same if the decoder keeps the interpreter's lock and delays all other requests
_IN_PYTHON = 16  # times the work of a decoder that is written in Python, e.g. for a run-length BMP
_UNLOCKED = ("JPEG", "MPO", "PNG", "PPM", "BMP", "TIFF", "GIF")


@dataclass(frozen=True)
class Cost:
    """The cost of decoding: `work`, pixels over all scans; `needs`, bytes; `is_light`: a thread of ours may do it."""

    work: int
    needs: int
    is_light: bool


def cost_of(body: bytes, most: float, upright: bool) -> Cost:
    """The cost by a picture's header. Refused without a header, and above `most` megapixels."""
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
    # Bytes a pixel: PIL's four, four for a turned or RGB copy, a JPEG's coefficients, and a foreign library's own.
    each = 4 + 4 * (upright or image.mode != "RGB") + 2 * len(image.getbands()) * (scans > 1) + 12 * (not is_unlocked)
    is_light = pixels * scans <= (_LIGHT if is_unlocked else _LOCKED_LIGHT)
    return Cost(pixels * scans, pixels * (each if is_light else each + 3), is_light)


def begun(body: bytes, most: float, preprocess: Preprocess) -> Tensor | Cost:
    """`prepared` for a picture that needs at most SMALL bytes, the cost of a larger one."""
    cost = cost_of(body, most, preprocess.upright)
    return prepared(body, preprocess) if cost.is_light and cost.needs <= SMALL else cost


def prepared(body: bytes, preprocess: Preprocess) -> Tensor:
    """The picture as the model's input, float32 [1, 3, S, S]. Refused if it cannot be read."""
    try:
        return preprocess(decode(body, "the body", preprocess.upright))[None]
    except UnreadablePicture as error:
        raise Refused(400, reason(error.__cause__)) from error


class DecodedApart:
    """Decoding in another process, which holds no lock of this one; `stop` ends it at any moment."""

    def __init__(self, body: bytes, preprocess: Preprocess) -> None:
        self.body, self.preprocess = body, preprocess
        self.process: Popen[bytes] | None = None
        self.is_stopped = False

    def __call__(self) -> Tensor:
        """`prepared`, to the bit."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "swin_quant.serving.picture", *[UPRIGHT] * self.preprocess.upright]
        with TemporaryFile() as file:
            streams: dict[str, Any] = {"stdin": PIPE, "stdout": file, "stderr": DEVNULL}
            with Popen(command, env=environment, start_new_session=True, **streams) as self.process:
                if self.is_stopped:
                    self.process.kill()
                self.process.communicate(self.body)
            file.seek(0)
            reply = file.readline(1000).decode()
            if self.process.returncode != 0:
                raise Refused(400, reply or UNREADABLE)
            width, height = map(int, reply.split())
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as whole:
                with whole[file.tell() :] as pixels:
                    image = Image.frombytes("RGB", (width, height), pixels)
        return self.preprocess(image)[None]

    def stop(self) -> None:
        self.is_stopped = True
        if self.process:
            self.process.kill()
