# Where steerscope is not installed, its entry point (for engine cores of their own) needs a name to be found by.
meta=${TMPDIR:-/tmp}/steerscope-meta/steerscope-0.dist-info
mkdir -p "$meta"
printf 'Metadata-Version: 2.1\nName: steerscope\nVersion: 0\n' > "$meta/METADATA"
printf '[vllm.general_plugins]\nsteerscope = steerscope.engines.vllm.plugin:register\n' > "$meta/entry_points.txt"
export PYTHONPATH=$PWD/src:$PWD/tests:$(dirname "$meta"):$PYTHONPATH
