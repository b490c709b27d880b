#!/usr/bin/env bash
# Build roll.cpp against the torch of PYTHON (default: that of .venv, else python3): build.sh FOLDER ->
# FOLDER/libswin_quant_torch.so
# DOMAIN is the operators' domain (swin_quant unless said otherwise). It needs g++.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?"usage: build.sh FOLDER"}
venv=$here/../../.venv/bin/python
[ -x "$venv" ] || venv=python3
python=${PYTHON:-$venv}
found=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__), int(torch.compiled_with_cxx11_abi()))' 2> /dev/null) || {
    echo "build.sh: $python imports no torch: pip install it there, or set PYTHON to an interpreter that does" >&2
    exit 1
}
mkdir -p "$out"
read -r torch abi <<< "$found"
g++ -std=c++20 -O2 -shared -fPIC -w "-D_GLIBCXX_USE_CXX11_ABI=$abi" "-DDOMAIN=${DOMAIN:-swin_quant}" \
    -I"$torch/include" -I"$torch/include/torch/csrc/api/include" "$here/roll.cpp" \
    -L"$torch/lib" -Wl,-rpath,"$torch/lib" -ltorch -ltorch_cpu -lc10 -o "$out/libswin_quant_torch.so"
