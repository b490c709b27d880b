"""Range methods: a file each, called as `--calibrator` calls it, which holds a METHOD; `quant.names` lists them."""

import importlib

from swin_quant.quant.names import CALIBRATORS
from swin_quant.quant.range_methods.method import RangeMethod

RANGE_METHODS: dict[str, RangeMethod] = {
    name: importlib.import_module(f"{__name__}.{name}").METHOD for name in CALIBRATORS
}
