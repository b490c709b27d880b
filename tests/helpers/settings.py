"""Change nodes' settings one by one, as no policy would."""

from dataclasses import replace


def change(node, **fields):
    """Change these fields of a node's setting."""
    node.setting = replace(node.setting, **fields)
