"""Range methods: each a file with a METHOD, named as in `--calibrator`; `quant.names` lists them."""

import importlib

from swin_quant.quant.names import CALIBRATORS
from swin_quant.quant.range_methods.method import RangeMethod

RANGE_METHODS: dict[str, RangeMethod] = {
    name: importlib.import_module(f"{__name__}.{name}").METHOD for name in CALIBRATORS
}
