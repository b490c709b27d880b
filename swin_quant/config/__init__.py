"""The configuration: keys, defaults and merge order are FasterTransformer's (docs/reference, section 7).

Defaults, then the files named by BASE, then the file itself, then `--opts`, then single command-line flags.
"""

from swin_quant.config.defaults import architecture, default_config
from swin_quant.config.load import check_geometry, find_config, from_dict, load_config, to_dict

__all__ = ["architecture", "check_geometry", "default_config", "find_config", "from_dict", "load_config", "to_dict"]
