"""A process that decodes one picture: the file on standard input; size in a line, then RGB on standard output."""

import os
import sys
from types import TracebackType

from swin_quant.data.pictures import UnreadablePicture, decode

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
