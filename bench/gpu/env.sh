# What all programs here need.
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING} VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-${TMPDIR:-/tmp}/vllm-cache}
# Where steerscope is not installed, its entry point (for engine cores of their own) needs a name to be found by.
meta=${TMPDIR:-/tmp}/steerscope-meta/steerscope-0.dist-info
mkdir -p "$meta"
printf 'Metadata-Version: 2.1\nName: steerscope\nVersion: 0\n' > "$meta/METADATA"
printf '[vllm.general_plugins]\nsteerscope = steerscope.engines.vllm.plugin:register\n' > "$meta/entry_points.txt"
export PYTHONPATH=$PWD/src:$PWD/tests:$(dirname "$meta"):$PYTHONPATH
