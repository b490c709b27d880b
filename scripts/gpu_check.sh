#!/usr/bin/env bash
# Run everything that needs a GPU in at most nine minutes: tests marked gpu, calibration, scoring in float16, QAT, one
# rank under torchrun, --compile by Triton, memory against its accounting, the time of a step, and the CUDA engine. Of
# the engine: its kernels' tests, every launch of whole networks against its reference, its times beside torch's and
# TensorRT's, each launch beside its floor, its accuracy under every policy beside fake-quant's, its files (int8, with a
# bfloat16 stream, for uint8 pictures, float8) from export to a service, and tune. The engine comes first; its kernels'
# tests and its times get the most time. Only tests/gpu/test_ranks.py, in `essentials`, uses NCCL: one GPU holds one
# rank, which needs no process group under torchrun.
# Without pytest-xdist the tests compile one kernel after another, and fewer of them finish in time.
#
#     scripts/gpu_check.sh [--device cuda|cpu] [--seconds N]
#
# PYTHON is the interpreter (default: .venv's, else python3), OUT the folder of logs, tables and summary.md (default:
# out/gpu_check), CIFAR a folder of CIFAR-10 as train.zip, val.zip and their maps, on which accuracy is scored (default:
# shared/data/cifar10 here or beside, else `digits`: 5,000 handwritten ones, most of them turned and shifted).
# Every step has its own time limit and log. A failure stops the other steps only if the GPU or a package that all need
# is missing. A step that takes too long is interrupted and reports its progress; a step that this GPU or machine cannot
# run is skipped, with the reason. The summary, with failed steps first, is printed at the end. Exit code 1 if a step
# failed. cuda_engine.json is kept: the next run measures what this one did not reach.
# Nothing is downloaded: packages that the interpreter lacks may lie in folders of PYTHONPATH.
# --device cpu is a dry run of the script itself with smaller work; its summary says that no GPU was measured.
set -u
caller=$PWD
cd "$(dirname "$0")/.." || exit 2

device=cuda
whole=525 # seconds that the numbers in `least` are parts of; an interrupted step takes up to 10 s more to report progress
ending=4  # of them, for an interrupted step to end and the next to begin
seconds=$whole
while [ $# -gt 0 ]; do
    case "$1" in
        --device) device=${2:?--device cuda or cpu}; shift 2 ;;
        --seconds) seconds=${2:?--seconds N}; shift 2 ;;
        *) sed -n '2,21p' scripts/gpu_check.sh; exit 2 ;;
    esac
done
case $device in cuda | cpu) ;; *) echo "gpu_check.sh: --device $device: it is cuda or cpu" >&2; exit 2 ;; esac
[[ $seconds =~ ^[1-9][0-9]{1,4}$ ]] || { echo "gpu_check.sh: --seconds $seconds: 10 or more" >&2; exit 2; }
# Paths are relative to the caller's folder; an interpreter's plain name is looked up in PATH.
from_caller() { case $1 in /*) echo "$1" ;; *) echo "$caller/$1" ;; esac; }
out=out/gpu_check
[ -z "${OUT:-}" ] || out=$(from_caller "$OUT")
case ${PYTHON:-} in */*) PYTHON=$(from_caller "$PYTHON") ;; esac
if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
case ${CIFAR:=} in
    digits) cifar= ;;
    "") cifar=$(ls -d shared/data/cifar10 ../shared/data/cifar10 2> /dev/null | head -n 1) ;;
    *) cifar=$(from_caller "$CIFAR") ;;
esac
[ -z "$cifar" ] || [ -f "$cifar/val.zip" ] || { echo "gpu_check.sh: CIFAR $cifar: holds no val.zip" >&2; exit 2; }
mkdir -p "$out" || exit 2
# Remove the files of the last run; other files there are not this script's.
while IFS=$'\t' read -r name _; do rm -f "$out/$name.log"; done 2> /dev/null < "$out/steps.tsv"
rm -f "$out"/{summary,cuda_engine,cuda_accuracy,memory,step_time}.md "$out/steps.tsv"
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 SWIN_QUANT_GPU="$device"
export HF_HUB_OFFLINE=1
unset TRITON_INTERPRET # kernels would be interpreted on the GPU's tensors
# Steps share the caches of Triton and torch.compile, also if there is no home folder.
[ -w "${HOME:-/nowhere}" ] || export TRITON_CACHE_DIR="$work/triton" TORCHINDUCTOR_CACHE_DIR="$work/inductor"
end=$((SECONDS + seconds))
failed=0
note=

# Seconds out of $whole that each step gets at least, whatever earlier steps take; see limit_of. They sum to less than
# $whole: the rest is for steps that need more.
declare -A least=(
    [environment]=8 [compile_ahead]=22 [kernels]=42 [sizes]=34 [essentials]=15
    [cuda_engine]=165
    [train]=9 [train_v2]=9 [calibrate]=8 [score]=8 [accuracy]=36 [export]=12 [verify]=8 [evaluate]=8 [logits]=7 [predict]=10
    [serve]=9 [align]=9 [tune]=10 [bench]=8 [finetune]=8 [torchrun]=9 [memory]=7 [step_time]=7 [compile]=16 [tests]=11
)
if [ "$device" = cpu ]; then # --compile takes minutes; nothing is tuned, or compiled for a GPU
    least=(
        [environment]=8 [kernels]=15 [sizes]=10 [essentials]=18
        [cuda_engine]=24
        [train]=14 [train_v2]=16 [calibrate]=12 [score]=12 [accuracy]=40 [export]=20 [verify]=12 [evaluate]=20 [logits]=10
        [predict]=10 [serve]=15 [align]=12 [bench]=14 [finetune]=14 [torchrun]=18 [memory]=9 [step_time]=14 [compile]=70
        [tests]=28
    )
fi

# limit_of NAME: the step's least, and half of the spare time, which is the time left less the leasts of all remaining
# steps and $ending for each. The last step gets all. If earlier steps left too little, all share it in proportion.
limit_of() {
    local name sum=0 own=$((least[$1] * seconds / whole)) left spare
    left=$((end - SECONDS - ending * (${#least[@]} - 1) * seconds / whole))
    for name in "${!least[@]}"; do sum=$((sum + least[$name])); done
    spare=$((left - sum * seconds / whole))
    if [ "$sum" -eq "${least[$1]}" ]; then echo "$left"
    elif [ "$spare" -lt 0 ]; then echo $((least[$1] * left / sum))
    else echo $((own + spare / 2)); fi
}

# summarize: the table, failed steps first, then the last lines of their logs.
summarize() {
    {
        if [ "$device" = cuda ]; then
            echo "# GPU check: $failed of $(wc -l < "$out/steps.tsv") steps failed"
        else
            echo "# DRY RUN of the GPU check on a CPU: $failed of $(wc -l < "$out/steps.tsv") steps failed; no GPU was used"
        fi
        echo
        echo "$(git rev-parse --short HEAD 2> /dev/null || echo 'no git'), $(date -u +%FT%TZ), $SECONDS s${note:+; $note}"
        printf '\n| step | s | result |\n|---|---|---|\n'
        for kind in failed skipped passed; do grep -P "\t$kind" "$out/steps.tsv"; done | sed 's/^/| /; s/\t/ | /g; s/$/ |/'
        grep -P '\tfailed' "$out/steps.tsv" | cut -f 1 | while read -r name; do
            printf '\n## %s failed\n\n```\n' "$name"
            tail -n 25 "$out/$name.log"
            echo '```'
        done
        printf '\n## environment\n\n```\n'
        cat "$out/environment.log"
        echo '```'
    } > "$out/summary.md"
}

# step NAME COMMAND...: run it within its limit; its result goes to steps.tsv.
step() {
    local name=$1 limit start=$SECONDS code result=
    limit=$(limit_of "$name")
    unset "least[$name]"
    shift
    printf '%s ... ' "$name"
    if [ "$limit" -lt 3 ]; then
        code=124
        echo "not started: the time of all steps was used up" > "$out/$name.log"
    else # pytest, and what cleans up, end on SIGINT with a report, on SIGTERM without
        { echo "$*"; timeout -s INT -k 10 "$limit" "$@"; } > "$out/$name.log" 2>&1 < /dev/null
        code=$?
    fi
    if [[ "$*" == *" pytest "* ]] && [ "$limit" -ge 3 ]; then
        result=$(tail -n 1 "$out/$name.log" | sed 's/^=* *//; s/ *=*$//') # counts of passed and skipped tests
        [ "$code" -ne 0 ] || [ "$device" = cpu ] || [[ $result == *" passed"* ]] || code=5 # nothing ran
        [ "$code" -eq 0 ] || [[ $result == *" in "* ]] || result= # it ended without pytest's last line
    fi
    case $code in
        0) result="passed${result:+: $result}" ;;
        5) result="failed: no test ran" ;;
        124 | 137)
            if [ "$limit" -lt 3 ]; then result="failed: no time was left"
            else result="failed: more than $limit s${result:+: $result}"; fi ;;
        *) result="failed: exit code $code${result:+: $result}" ;;
    esac
    [ "$code" -eq 0 ] || failed=$((failed + 1))
    printf '%s\t%s\t%s\n' "$name" "$((SECONDS - start))" "$result" >> "$out/steps.tsv"
    echo "$result, $((SECONDS - start)) s"
    summarize # after each step, in case the script is killed
    return "$code"
}

# skip NAME REASON: record a step that this GPU or machine cannot run.
skip() {
    unset "least[$1]"
    printf '%s\t0\tskipped: %s\n' "$1" "$2" >> "$out/steps.tsv"
    echo "$1 ... skipped: $2"
    summarize
}

# finish: print the summary without the environment, and its path.
finish() {
    sed '/^## environment$/,$d' "$out/summary.md" | head -n 100
    echo "$out/summary.md"
}

swin_quant() { step "$1" "$PYTHON" -m swin_quant "${@:2}" --device "$device"; }

if [ "$device" = cuda ]; then
    models=(swin_tiny_patch4_window7_224 swin_base_patch4_window7_224)
    batch=64
    few=()
    epochs=4
    scored=5000
    engine_batch=96 # one size for all steps of small networks, so that kernels are compiled once
    engine=()
else
    models=(swin_digits)
    batch=8
    few=(--set epoch_pictures=256)
    epochs=2
    scored=16
    engine_batch=8
    engine=(--device cpu --models swin_digits --batch 2)
fi
digits=(--cfg swin_digits --data-path digits)
trained=$work/train/swin_micro_digits.pth
trained_v2=$work/train_v2/swinv2_micro_digits.pth
calibrated=$work/calib/swin_micro_digits_calib.pth
deployed=$work/deploy/swin_micro_digits_int8_cuda.safetensors # `tune` writes its tiles beside it
uint8=$work/uint8/swin_micro_digits_int8_uint8_cuda.safetensors
forms=("$deployed" "$work/bfloat16/swin_micro_digits_int8_cuda.safetensors" "$uint8")

step environment "$PYTHON" scripts/gpu_environment.py "$device"
case $? in 2 | 126 | 127) # no step can run; 126, 127: no such interpreter
    finish
    exit 1 ;;
esac
# Each process compiles the kernels that it launches: several processes share the work, if pytest-xdist is there.
several=()
if [ "$device" = cuda ]; then
    if "$PYTHON" -c 'import xdist' > /dev/null 2>&1; then
        several=(-n "$(nproc)" --maxprocesses 12)
    else
        note="no pytest-xdist here: kernels of tests are compiled one after another"
        echo "$note"
    fi
    # Compile the kernels of `sizes` and `align` on all cores, with pytest-xdist or without.
    step compile_ahead "$PYTHON" benchmarks/cuda_engine.py --only-compile --seconds $(($(limit_of compile_ahead) * 2 / 3)) \
        --models swin_tiny_patch4_window7_224 swin_base_patch4_window7_224 swinv2_tiny_patch4_window8_256 \
        swin_digits --batch 8
fi
sizes=(tests/backends/cuda/kernels/test_sizes.py tests/backends/cuda/kernels/test_wide_sizes.py) # as deployed
tests=(env OMP_NUM_THREADS=2 "$PYTHON" -m pytest -m gpu -rA -p no:cacheprovider)
step kernels "${tests[@]}" ${several[@]+"${several[@]}"} tests/backends/cuda tests/gpu/test_cuda_engine.py \
    tests/gpu/test_fusions.py tests/gpu/test_tiles.py "${sizes[@]/#/--ignore=}"
step sizes "${tests[@]}" ${several[@]+"${several[@]}"} "${sizes[@]}"
step essentials "${tests[@]}" tests/gpu/test_ranks.py tests/gpu/test_arithmetic.py
left=$(limit_of cuda_engine)
step cuda_engine "$PYTHON" benchmarks/cuda_engine.py --seconds $((left > 30 ? left - 15 : left / 2)) \
    --output "$out" ${engine[@]+"${engine[@]}"}
training=(--data-path digits --recipe digits "${few[@]}" --epochs "$epochs")
swin_quant train train --cfg swin_digits "${training[@]}" --output "$work/train"
if [ -z "$cifar" ]; then
    judged=(--data-path digits --models "swin_digits=$trained" "swinv2_digits=$trained_v2")
    swin_quant train_v2 train --cfg swinv2_digits "${training[@]}" --output "$work/train_v2"
else
    judged=(--data-path "$cifar")
    skip train_v2 "it is for accuracy on the digits, which is scored on $cifar"
fi
swin_quant calibrate calibrate "${digits[@]}" --checkpoint "$trained" --policy ft-mode1 --output "$work/calib"
swin_quant score evaluate "${digits[@]}" --checkpoint "$calibrated" --policy ft-mode1 ft-mode2 qdq
# Later steps reuse the kernels that `accuracy` compiles in parallel.
step accuracy "$PYTHON" benchmarks/cuda_accuracy.py --device "$device" "${judged[@]}" --pictures "$scored" \
    --batch "$engine_batch" --forms cuda cuda-fp8 "cuda, bfloat16" "cuda, uint8" ft-mode1 ft-mode2 \
    --output "$out/cuda_accuracy.md"
made=("deploy --policy cuda" "bfloat16 --policy cuda --float-type bfloat16" "uint8 --policy cuda --uint8-input")
if no_float8=$(grep '^no float8' "$out/environment.log"); then
    skip export_fp8 "$no_float8"
else
    made+=("fp8 --policy cuda-fp8")
    forms+=("$work/fp8/swin_micro_digits_fp8_cuda.safetensors")
fi
all='for form in "${@:3}"; do "$0" -m swin_quant export "$1" --for cuda --output "$2/${form%% *}" ${form#* } || exit; done'
step export bash -c "$all" "$PYTHON" "$calibrated" "$work" "${made[@]}" # each: folder and flags
on_digits=(--data-path digits --batch "$engine_batch")
swin_quant verify verify "$deployed" --checkpoint "$calibrated" "${on_digits[@]}" --pictures "$engine_batch"
swin_quant evaluate evaluate "${forms[@]}" --checkpoint "$calibrated" "${on_digits[@]}"
swin_quant logits predict "$deployed" "${on_digits[@]}" --logits "$work/logits"
swin_quant predict predict "$uint8" docs/images/report.png
# One picture at a time, with the kernels that `predict` has compiled.
if "$PYTHON" -c 'import starlette, uvicorn, prometheus_client' > /dev/null 2>&1; then
    step serve "$PYTHON" benchmarks/serve.py "$uint8" --clients 2 --seconds 1 --hanging 1 --max-batch 1
else
    skip serve "no starlette, uvicorn or prometheus_client here"
fi
swin_quant align align "$calibrated" "$deployed" --policy cuda --data-path digits --pictures 8
if [ "$device" = cuda ]; then # a CPU has nothing to tune
    step tune "$PYTHON" -m swin_quant cuda tune "$deployed" --batch "$engine_batch" --seconds $(($(limit_of tune) / 2))
fi
swin_quant bench bench "$deployed" --checkpoint "$calibrated" --batch "$engine_batch" --rounds 2 --seconds 0.2 \
    --threads 1 # the GPU needs no more, and in a dry run several would wait for each other on a busy CPU
qat=("${digits[@]}" "${few[@]}" --checkpoint "$calibrated" --teacher "$trained" --epochs 1)
swin_quant finetune finetune "${qat[@]}" --amax learned --amp-opt-level O1 --output "$work/qat"
step torchrun "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node 1 -m swin_quant finetune \
    "${qat[@]}" --output "$work/rank" --device "$device"
step memory "$PYTHON" benchmarks/memory.py --device "$device" --models "${models[@]}" --batch "$batch" \
    --output "$out/memory.md"
step step_time "$PYTHON" benchmarks/qat_step.py --models "${models[0]}" --batch "$batch" \
    --precision O0 O1 --output "$out/step_time.md"
swin_quant compile finetune "${qat[@]}" --compile --output "$work/compile"
# Last, with all the time that is left.
step tests "${tests[@]}" tests/gpu --ignore tests/gpu/test_cuda_engine.py --ignore tests/gpu/test_fusions.py \
    --ignore tests/gpu/test_tiles.py --ignore tests/gpu/test_ranks.py --ignore tests/gpu/test_arithmetic.py

finish
[ "$failed" -eq 0 ]
