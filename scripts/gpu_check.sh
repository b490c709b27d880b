#!/usr/bin/env bash
# The entry of scripts/gpu_check.py, whose head says what it does: scripts/gpu_check.sh --help prints it.
# PYTHON is the interpreter, also of every step (default: .venv's, else python3).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x "$root/.venv/bin/python" ] || PYTHON=$root/.venv/bin/python
fi
exec "$PYTHON" "$root/scripts/gpu_check.py" "$@"
