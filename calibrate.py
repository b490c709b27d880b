"""PTQ: float checkpoint + pictures -> calibrated checkpoint + run card (the same as `swin-quant calibrate`)."""

import sys

from swin_quant.cli import main

if __name__ == "__main__":
    sys.exit(main(["calibrate", *sys.argv[1:]]))
