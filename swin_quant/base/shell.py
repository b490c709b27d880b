"""Commands that are shown, to be copied into a shell."""

import re


def command_lines(command: str, width: int) -> list[str]:
    """The command in lines of at most `width` columns, which a shell joins; a flag and its values stay together."""
    parts: list[str] = []
    for word in re.findall(r"""(?:'[^']*'|"[^"]*"|\S)+""", command):
        if parts and parts[-1].startswith("--") and not word.startswith("--"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = parts[:1]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + len("  \\") > width:
            lines[-1] += " \\"
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}"
    return lines
