"""Finding policies: the built-in ones under configs/policies/ and YAML files of the user's."""

from swin_quant.config import shipped_files
from swin_quant.quant.policy import Policy, policy_from_dict
from swin_quant.yaml_file import read_yaml, shipped_or_file


def builtin_policies() -> list[str]:
    """Names of the policies that come with the package."""
    return [path.stem for path in shipped_files("policies")]


def load_policy(name_or_path: str) -> Policy:
    """A built-in policy by name, or one from a YAML file. UsageError names the file and what is wrong in it."""
    path = shipped_or_file(name_or_path, shipped_files("policies"), "policy")
    return policy_from_dict(read_yaml(path, "policy"), str(path))
