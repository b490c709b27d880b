"""FasterTransformer's front door: --calib, --eval, --throughput, with its flags."""

import sys

from swin_quant.cli import main

if __name__ == "__main__":
    sys.exit(main(["ft", "front-door", *sys.argv[1:]]))
