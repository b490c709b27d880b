"""Any file becomes 8-bit RGB, or is unreadable with a reason: no defect of one picture is fatal."""

import io
import struct
import zlib

import numpy as np
import pytest
from encoded import encoded
from PIL import Image

from swin_quant.data.pictures import FORMATS, UnreadablePicture, decode

GREYS = np.linspace(0, 255, 12 * 10).reshape(12, 10).round().astype(np.uint8)
PHOTO = np.stack([GREYS, GREYS[::-1], np.full_like(GREYS, 90)], axis=-1)


def pixels(data: bytes | Image.Image) -> np.ndarray:
    image = decode(data, "a.png")
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def test_greyscale_fills_three_channels():
    assert (pixels(encoded(Image.fromarray(GREYS), "PNG")) == GREYS[..., None]).all()


@pytest.mark.parametrize("kind", ["PNG", "PPM", "TIFF"])
def test_16_bit_greyscale_is_scaled_and_not_clipped(kind):
    samples = np.array([[0, 128, 129, 300], [257 * 100, 257 * 200, 65535 - 129, 65535]], dtype=np.uint16)
    expected = np.array([[0, 0, 1, 1], [100, 200, 254, 255]])
    assert (pixels(encoded(Image.fromarray(samples), kind)) == expected[..., None]).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "I;16"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF"])
def test_a_camera_s_picture_is_turned_if_that_is_asked_for(kind, mode):
    """EXIF 2.32, tag 0x0112: 6 is a quarter turn clockwise, 5 the transpose."""
    if mode == "I;16" and kind != "PNG":
        pytest.skip("has 8 bits a sample")
    corner = np.zeros((16, 32), np.uint8)
    corner[:8, :8] = 255
    image = Image.fromarray(corner.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(corner).convert(mode)
    for orientation, expected in ((1, corner), (5, corner.T), (6, np.rot90(corner, -1))):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(image, kind, exif=exif.tobytes(), **({} if kind == "PNG" else {"quality": 100}))
        turned, plain = (np.asarray(decode(data, "a", upright))[..., 0].astype(int) for upright in (True, False))
        assert turned.shape == expected.shape and abs(turned - expected).max() < 20
        assert plain.shape == corner.shape and abs(plain - corner).max() < 20


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animation_gives_its_first_frame(kind):
    first, second = Image.new("RGB", (8, 8), (200, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 200))
    data = encoded(first, kind, save_all=True, append_images=[second])
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 2
    assert abs(pixels(data) - [200, 0, 0]).max() <= 10


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_every_format_is_taken_by_the_extensions_that_pil_has_for_it(kind):
    Image.init()
    assert all(Image.EXTENSION[extension] in (kind, "MPO") for extension in FORMATS[kind])
    if kind in Image.SAVE:
        image = Image.fromarray(PHOTO).resize((64, 64)).convert("1" if kind == "XBM" else "RGB")
        assert abs(pixels(encoded(image, kind)) - np.asarray(image.convert("RGB")).astype(int)).mean() < 3


def test_what_pil_reads_by_programs_or_by_decoders_of_its_own_choice_is_not():
    assert not {"EPS", "WMF", "PDF", "FITS", "IPTC", "ICO", "ICNS", "DDS", "BLP", "XPM"} & FORMATS.keys()


def huge_png(width: int, height: int) -> bytes:
    data = encoded(Image.new("L", (1, 1)), "PNG")
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
NOISY_JPEG = encoded(Image.fromarray(NOISE), "JPEG")
NOISY_PNG = encoded(Image.fromarray(NOISE), "PNG")

FRAME = NOISY_JPEG.index(b"\xff\xc0") + 5  # height and width, two bytes each
SCANS = NOISY_JPEG[:FRAME] + struct.pack(">HH", 8000, 8000) + NOISY_JPEG[FRAME + 4 : -2] + 40 * b"\xff\xda\0\x08\1"

DEFECTS = {
    "a JPEG 2000": (encoded(Image.fromarray(NOISE), "JPEG2000"), "known format"),
    "a JPEG of many scans": (SCANS, "41 scans of 8000 x 8000 pixels"),
    "zero bytes": (b"", "empty"),
    "text": (b"<html><body>404 Not Found</body></html>", "known format"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", "known format"),
    "truncated JPEG": (NOISY_JPEG[: len(NOISY_JPEG) // 2], "truncated.*: the picture is damaged or cut off"),
    "JPEG of a header": (NOISY_JPEG[:20], "known format"),
    "truncated PNG": (NOISY_PNG[: len(NOISY_PNG) // 2], "truncated.*: the picture is damaged or cut off"),
    "corrupt PNG": (NOISY_PNG[:200] + b"\xff" * 50 + NOISY_PNG[250:], "stream"),
    "bomb over PIL's error threshold": (huge_png(60000, 60000), "pixels"),
    "bomb over PIL's warning threshold": (huge_png(9500, 9500), "pixels"),
    "ribbon": (encoded(Image.new("L", (1, 5000)), "PNG"), "times the other"),
    "float samples": (encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "white"),
    "32-bit samples": (encoded(Image.fromarray(np.full((4, 4), 70000, np.int32)), "TIFF"), "white"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_unreadable_with_name_and_reason_in_one_line(defect, recwarn):
    data, reason = DEFECTS[defect]
    with pytest.raises(UnreadablePicture, match=reason) as caught:
        decode(data, "cat/7.jpg")
    message = str(caught.value)
    assert message.startswith("cat/7.jpg: ") and len(message) > len("cat/7.jpg: ") and "\n" not in message
    assert not [str(x.message) for x in recwarn.list]
