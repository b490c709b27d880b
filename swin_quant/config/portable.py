"""The config as a run card keeps it."""

from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from swin_quant.config import to_dict
from swin_quant.config.families import built_in, families


def portable_config(cfg: CfgNode) -> dict[str, Any]:
    """The config as a run card keeps it: without the folders of the machine it ran on."""
    data = to_dict(cfg)
    for family in families().values():  # a reader without that package would not know the section
        if family.name not in (cfg.MODEL.TYPE, *built_in()):
            del data["MODEL"][family.section]
    data["DATA"]["DATA_PATH"] = Path(cfg.DATA.DATA_PATH).name
    data["OUTPUT"] = ""
    for key in ("RESUME", "PRETRAINED"):
        data["MODEL"][key] = Path(cfg.MODEL[key]).name
    return data
