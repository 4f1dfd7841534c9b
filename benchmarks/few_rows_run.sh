#!/bin/sh
# Stages of the few-rows measurement, each within 150 s: sh benchmarks/few_rows_run.sh STAGE ...
#   quick     checks, then a layer of 0.6B fused and not
#   model     0.6B, ms a step and kernels of one request: fused, single kernels, bucket of 8
#   layers    a layer of either model, every way
#   tune0.6   each product of 0.6B in every variant        tune8   the same of 8B
#   model8    8B: fused with all weights, bucket of 8 as today, fused up to 32 MiB
PY=${PY:-python}
SMALL=benchmarks/shapes/qwen3-0.6b
LARGE=benchmarks/shapes/llama-3-8b
kernels() { timeout 150 $PY benchmarks/kernels.py "$@"; }
profile() { echo "== $*"; timeout 100 $PY benchmarks/profile_step.py "$@" 2>&1 | grep -v Warning | tail -24; }
for stage in "$@"; do
    case $stage in
    quick) kernels "few rows check" "few rows layer 0.6B fused, 1 row" "few rows layer 0.6B single" ;;
    model)
        profile $SMALL decode 1 256 fused_rows=1
        profile $SMALL decode 1 256 fused_rows=0
        profile $SMALL decode 8 256 fused_rows=0
        ;;
    layers) kernels "few rows layer" ;;
    tune0.6) kernels "few rows time 0.6B" ;;
    tune8) kernels "few rows time 8B" ;;
    model8)
        profile $LARGE decode 1 256 fused_rows=1 fused_mib=1024
        profile $LARGE decode 8 256 fused_rows=0
        profile $LARGE decode 1 256 fused_rows=1
        ;;
    esac
done
