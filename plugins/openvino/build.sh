#!/bin/sh
# Builds libswin_quant_plugins.so into FOLDER (default: build/ beside this), against the OpenVINO that PYTHON imports
# (default: that of .venv, else python3):
#     [PYTHON=FILE] [CXX=g++] [CXXFLAGS=-fsanitize=address] [DOMAIN=swin_quant] [ISA=amx|avx512-vnni|avx-vnni|avx2]
#         plugins/openvino/build.sh [FOLDER]
# ISA: the instructions of its kernels (default: the best of them that this CPU has, else plain loops).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/build}
venv=$here/../../.venv/bin/python
[ -x "$venv" ] || venv=python3
python=${PYTHON:-$venv}
root=$("$python" -c 'import os, openvino; print(os.path.dirname(openvino.__file__))' 2> /dev/null) || {
    echo "build.sh: $python imports no openvino: pip install it there, or set PYTHON to an interpreter that does" >&2
    exit 1
}
mkdir -p "$out"
libraries=$(cd "$root/libs" && ls libopenvino.so.* libopenvino_onnx_frontend.so.* | sed 's/^/-l:/')
# The wheel has TBB, with its headers, for work on several threads.
tbb=$(cd "$root/libs" && ls libtbb.so.* 2> /dev/null | sed 's/^/-l:/')
native() {
    case $(${CXX:-g++} -march=native -dM -E -x c++ /dev/null 2> /dev/null) in
    *__AMX_INT8__*) echo amx ;;
    *__AVX512VNNI__*) echo avx512-vnni ;;
    *__AVXVNNI__*) echo avx-vnni ;;
    *__AVX2__*) echo avx2 ;;
    esac
}
isa=$(echo "${ISA:-$(native)}" | tr a-z- A-Z_)
# An assembler of before 2020 does not know tiles.
if [ "$isa" = AMX ] && ! echo 'tilezero %tmm0' | ${CXX:-g++} -c -x assembler -o /dev/null - 2> /dev/null; then
    isa=AVX512_VNNI
fi
# shellcheck disable=SC2086  # they are several words
${CXX:-g++} -std=c++17 -O2 -shared -fPIC ${tbb:+-DSWIN_QUANT_TBB} ${isa:+-DSWIN_QUANT_$isa} \
    -DSWIN_QUANT_DOMAIN="\"${DOMAIN:-swin_quant}\"" ${CXXFLAGS:-} \
    -I"$root/include" "$here/extension.cpp" -L"$root/libs" $libraries $tbb -Wl,-rpath,"$root/libs" \
    -o "$out/libswin_quant_plugins.so"
