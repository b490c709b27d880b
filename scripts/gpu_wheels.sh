#!/usr/bin/env bash
# Download wheels of the packages that a GPU machine lacks, for scripts/gpu_check.sh on it, which finds them by itself.
#
#     scripts/gpu_wheels.sh [FOLDER] [--python 3.12] [--arch x86_64] [PACKAGE ...]
#
# FOLDER (default: gpu_wheels in this checkout) takes the place of its earlier content. Git does not ignore gpu_wheels,
# so that it travels with a copy of the tracked and the not ignored files; do not commit it. Packages are by default
# those that a machine with torch, triton, timm and pytest usually lacks. None brings what it needs itself: name that,
# too. Versions are those of constraints.txt where it has them.
set -euo pipefail
folder=
python=3.12
arch=x86_64
packages=()
while [ $# -gt 0 ]; do
    case "$1" in
        --python) python=${2:?--python 3.12}; shift 2 ;;
        --arch) arch=${2:?--arch x86_64}; shift 2 ;;
        -*) sed -n '2,9p' "$0"; exit 2 ;;
        *) if [ -z "$folder" ]; then folder=$1; else packages+=("$1"); fi; shift ;;
    esac
done
[[ $python =~ ^3\.[0-9]+$ ]] || { echo "gpu_wheels.sh: --python $python: a version such as 3.12" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${folder:-$root/gpu_wheels}
[ ${#packages[@]} -gt 0 ] || packages=(yacs termcolor)
if [ -e "$folder" ] && [ -n "$(find "$folder" -mindepth 1 ! -name '*.whl' -print -quit)" ]; then
    echo "gpu_wheels.sh: $folder: holds other files than wheels; name another folder" >&2
    exit 2
fi
PYTHON=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
platforms=()
for glibc in 39 35 34 31 28 27 24 17; do platforms+=(--platform "manylinux_2_${glibc}_$arch"); done
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
for package in "${packages[@]}"; do
    pinned=$(sed -n "s/^\($package==[^ ;]*\).*/\1/p" "$root/constraints.txt" | head -n 1)
    "$PYTHON" -m pip download --quiet --no-deps --only-binary :all: --implementation cp --python-version "$python" \
        "${platforms[@]}" --platform "manylinux2014_$arch" --dest "$made" "${pinned:-$package}" 2> "$made/said" || {
        echo "gpu_wheels.sh: ${pinned:-$package}: $(grep '^ERROR' "$made/said" | tail -n 1)" >&2
        exit 1
    }
    rm "$made/said"
done
rm -rf "$folder"
mkdir -p "$(dirname "$folder")"
cp -r "$made" "$folder"
chmod 755 "$folder"
(cd "$folder" && du --bytes -- *.whl | sed 's/\t/ bytes: /')
echo "$folder: $(cat "$folder"/*.whl | wc -c) bytes for Python $python on $arch"
