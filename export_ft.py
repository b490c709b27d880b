"""Export: calibrated checkpoint -> FasterTransformer's files (the same as `swin-quant ft export`)."""

import sys

from swin_quant.cli import main

if __name__ == "__main__":
    sys.exit(main(["ft", "export", *sys.argv[1:]]))
