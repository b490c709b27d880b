#!/usr/bin/env bash
# examples/report.html and its picture in the README, made again: calibrated, scored, searched and timed on this machine.
#   scripts/example_report.sh CIFAR10 [WORK] [prepare | measure | draw]
# CIFAR10: a folder with train.zip, train_map.txt, val.zip and val_map.txt; WORK: for what lies between (build/example).
# `prepare` and `draw` time nothing and can run beside other work; `measure`, between them, cannot. Default: all three.
# PYTHON: of the environment, with playwright (.venv/bin/python); BROWSER: Chromium; POLICY: for OpenVINO, by default
# the one with compiled operators. SCORED, COMPARED, SEARCHED, FEW: pictures of the scores (all of val), of the page, of
# the search and of sensitivity.
set -euo pipefail
cd "$(dirname "$0")/.."
data=(--data-path "$(realpath "$1")")
work=${2:-build/example}
python=${PYTHON:-.venv/bin/python}
scored=("${data[@]}" ${SCORED:+--pictures "$SCORED"})
policy=${POLICY:-cpu-operators}
name=swin_micro_cifar10
calibrated=$work/cpu/${name}_calib.pth
ours() { echo "== swin-quant ${*:1:2} ..." >&2; PYTHONPATH=. "$python" -m swin_quant "$@"; }

prepare() {
    rm -rf "$work"
    ours calibrate "examples/checkpoints/$name.safetensors" --cfg "examples/checkpoints/$name.yaml" "${data[@]}" \
        --policy "$policy" --output "$work/cpu"
    ours sensitivity "$calibrated" "${data[@]}" --pictures "${FEW:-64}"
    for engine in openvino onnxruntime; do
        ours export "$calibrated" --for "$engine" --output "$work/$engine"
        ours verify "$work/$engine"/*_int8_*.onnx --engine "$engine" "${data[@]}"
    done
}

measure() {
    ours evaluate "$calibrated" "${scored[@]}" --policy "$policy" ft-mode1 ft-mode2
    ours evaluate "$work"/*/*_int8_*.onnx --checkpoint "$calibrated" "${scored[@]}"
    ours search "$calibrated" "${data[@]}" --engine openvino --batch 8 --min-sqnr 36 --pictures "${SEARCHED:-128}" \
        --output "$work/cpu"
}

draw() {
    ours report "${calibrated%.pth}.json" "$work"/openvino/*.json "$work"/onnxruntime/*.json "${data[@]}" \
        --pictures "${COMPARED:-1000}" --html "$work/report.html"
    size=$(stat -c %s "$work/report.html")
    if ((size > 2000000)); then
        echo "error: $work/report.html has $size bytes, more than 2 MB: nothing was replaced" >&2
        exit 1
    fi
    "$python" scripts/screenshot.py "$work/report.html" "$work/report.png"
    cp "$work/report.html" examples/report.html
    cp "$work/report.png" docs/images/report.png
}

for step in ${3:-prepare measure draw}; do
    "$step"
done
