"""Finding policies: the built-in ones under configs/policies/ and YAML files of the user's."""

from pathlib import Path

from swin_quant.config import configs_dir
from swin_quant.quant.policy import Policy, policy_from_dict
from swin_quant.yaml_file import read_yaml, shipped_or_file

INT8_MODES = {1: "ft-mode1", 2: "ft-mode2"}


def _builtin() -> list[Path]:
    return sorted((configs_dir() / "policies").glob("*.yaml"), key=lambda path: path.stem)


def builtin_policies() -> list[str]:
    """Names of the policies that come with the package."""
    return [path.stem for path in _builtin()]


def load_policy(name_or_path: str) -> Policy:
    """A built-in policy by name, or one from a YAML file. UsageError names the file and what is wrong in it."""
    path = shipped_or_file(name_or_path, _builtin(), "policy")
    return policy_from_dict(read_yaml(path, "policy"), str(path))
