"""Finding policies: the built-in ones under configs/policies/, a YAML file of the user's, and the command line's."""

from pathlib import Path

import yaml

from swin_quant.config import configs_dir
from swin_quant.errors import UsageError
from swin_quant.quant.policy import Policy, policy_from_dict

INT8_MODES = {1: "ft-mode1", 2: "ft-mode2"}
_LARGEST_FILE = 1 << 20


def builtin_policies() -> list[str]:
    """Names of the policies that come with the package."""
    return sorted(path.stem for path in (configs_dir() / "policies").glob("*.yaml"))


def load_policy(name_or_path: str) -> Policy:
    """A built-in policy by name, or one from a YAML file. UsageError names the file and what is wrong in it."""
    path = Path(name_or_path)
    if name_or_path in builtin_policies():
        path = configs_dir() / "policies" / f"{name_or_path}.yaml"
    elif path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"no policy {name_or_path!r}: give {', '.join(builtin_policies())} or a .yaml file")
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise UsageError(f"{path}: larger than 1 MB, this is no policy")
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read policy {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())[:200]}") from error
    return policy_from_dict(data, str(path))
