"""Export: calibrated checkpoint -> FasterTransformer's files, as `swin-quant export --for fastertransformer`."""

import sys

from swin_quant.cli import main

if __name__ == "__main__":
    sys.exit(main(["export", "--for", "fastertransformer", *sys.argv[1:]]))
