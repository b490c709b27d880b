"""The forms in which a body comes: compressed, or as a form with a picture in it."""

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Mapping

from swin_quant.serving.limits import Refused

_WINDOW = {"gzip": 31, "deflate": 15}  # zlib's names for the frames around the same compression
_PIECE = 2**16  # bytes at a time: a fraction of a millisecond
_FORM = re.compile(r'multipart/form-data\s*;.*?boundary=("?)([^";]{1,70})\1', re.IGNORECASE)
_IS_FILE = re.compile(rb'form-data\s*;.*?(filename\s*=|\bname\s*=\s*"?file\b)', re.IGNORECASE | re.DOTALL)
_MOST_FIELDS, _HEAD = 8, 2**10  # of a form, bytes of a field's head
_TYPED = "application/x-www-form-urlencoded"  # curl -d and --data-binary say this of anything


async def expanded(parts: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """The bytes of a body in small pieces, expanded if its Content-Encoding says that it is compressed.

    Refused for another encoding (415), and for what is no such stream (400).
    """
    if encoding in ("", "identity"):
        async for part in parts:
            yield part
        return
    if encoding not in _WINDOW:
        raise Refused(415, f"Content-Encoding {encoding:.20}: bodies are read as they are, or from gzip or deflate")
    reader = zlib.decompressobj(_WINDOW[encoding])
    async for part in parts:
        try:
            piece = b""
            while part or len(piece) == _PIECE:  # after a full piece zlib may hold more, with no input left
                piece = reader.decompress(part, _PIECE)
                part = reader.unconsumed_tail
                yield piece
                if reader.unused_data:
                    raise Refused(400, f"the body goes on behind its {encoding}")
                await asyncio.sleep(0)  # a body may grow a thousandfold: others go on meanwhile
        except zlib.error:
            raise Refused(400, f"the body is not {encoding}, as its Content-Encoding says") from None
    if not reader.eof:
        raise Refused(400, f"the body ends within its {encoding}")


def boundary_of(headers: Mapping[str, str]) -> bytes | None:
    """The boundary between the fields of a form (multipart/form-data); None for another body."""
    found = _FORM.match(headers.get("content-type", ""))
    return found[2].encode("latin-1", "replace") if found else None


def file_in(form: bytes, boundary: bytes) -> bytes:
    """The one file of a form: a field with a file's name, or called file. Refused for a form without one."""
    parts = (b"\r\n" + form).split(b"\r\n--" + boundary, _MOST_FIELDS + 2)
    fields = [part.partition(b"\r\n\r\n") for part in parts[1:] if part.startswith(b"\r\n")]
    files = [content for head, _, content in fields if _IS_FILE.search(head[:_HEAD])]
    if len(files) != 1 or len(fields) > _MOST_FIELDS or not parts[-1].startswith(b"--"):
        needs = f"one file and at most {_MOST_FIELDS} fields"
        raise Refused(400, f"the form must be whole, with {needs}: send it by curl -F file=@cat.jpg")
    return files[0]


def advice(headers: Mapping[str, str]) -> str:
    """The right call for a client whose picture cannot be read and who may have sent it by `curl -d`."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != _TYPED:
        return ""
    return ": curl -d changes a file's bytes: send it by curl --data-binary @cat.jpg, or by curl -F file=@cat.jpg"
