"""Pictures as this model takes them, in numpy and Pillow alone; to the bit what it was scored with.

python preprocess.py cat.jpg input.bin writes one as raw numbers, for programs in other languages.
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

SETTINGS = json.loads(Path(__file__).with_name("preprocess.json").read_text())

_ORIENTATION = 0x0112  # EXIF's tag


def preprocess(file, settings=SETTINGS):
    """The array of one picture: float32 [3, H, W], or uint8 [H, W, 3] for a model that normalises on its own."""
    picture = Image.open(file)
    if settings.get("upright") and picture.getexif().get(_ORIENTATION, 1) != 1:
        picture = ImageOps.exif_transpose(picture)
    picture = resized(rgb(picture), settings)
    if settings["type"] == "uint8":
        return np.array(picture)
    scaled = np.asarray(picture, np.float32) / np.float32(255)
    normal = (scaled - np.float32(settings["mean"])) / np.float32(settings["std"])
    return np.ascontiguousarray(normal.transpose(2, 0, 1)).astype(settings["type"])


def rgb(image):
    """Eight bits a channel; of 16-bit greyscale all of them count, where Pillow's own conversion clips to white.
    32-bit integers up to 255 are eight bits."""
    says_white = image.mode != "I" or image.format in ("PNG", "PPM")
    if image.mode.startswith("I") and (says_white or image.getextrema()[1] > 255):
        image = Image.fromarray(((np.asarray(image).astype(np.int64) + 128) // 257).astype(np.uint8))
    return image.convert("RGB")


def resized(image, settings):
    """The shorter side to `resize`, or height and width where that is a pair, which a picture that keeps its shape
    `covers`; none: as it is. Then `crop` out of the centre."""
    method, target = Image.Resampling[settings["interpolation"].upper()], settings["resize"]
    if target is None:
        return image
    if isinstance(target, int):
        short, long = sorted(image.size)
        longer = int(target * long / short)
        target = (target, longer) if image.height <= image.width else (longer, target)
    elif settings.get("covers"):
        ratio = min(image.height / target[0], image.width / target[1])
        target = (round(image.height / ratio), round(image.width / ratio))
    image = image.resize((target[1], target[0]), method)
    if crop := settings["crop"]:
        high, wide = (crop, crop) if isinstance(crop, int) else crop
        beside = (image.width - wide, image.height - high)
        down = settings.get("crop_offset") == "rounded down"
        left, top = (room // 2 if down else int(round(room / 2)) for room in beside)
        image = image.crop((left, top, left + wide, top + high))
    return image


if __name__ == "__main__":
    pixels = preprocess(sys.argv[1])
    pixels.tofile(sys.argv[2])
    print(f"{sys.argv[2]}: {pixels.dtype} {list(pixels.shape)}")
