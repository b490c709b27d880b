"""python -m swin_quant: the same as `swin-quant`."""

import sys

from swin_quant.cli import main

if __name__ == "__main__":
    sys.exit(main())
