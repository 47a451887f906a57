#!/bin/bash
# What each kind of request costs on a GPU against untouched vLLM, in pairs. Usage: speed.sh OUT [run ...]
# Needs vLLM on PYTHONPATH; writes OUT/speed-<run>.json, OUT/profile-<cell>.json and a log of each.
out=$1; shift
runs=${*:-"qwen loads one eager noop profile llama-8b llama-1b peer lens"}
tmp=${TMPDIR:-/tmp}
mkdir -p "$out"
. bench/gpu/env.sh
limit=${LIMIT:-540}; rounds=${ROUNDS:-20}; seconds=${CELL_SECONDS:-40}
some="noise zero-layer all-layers generated add cap"
pair() {  # name, then options of bench.gpu.paired
  name=$1; shift; start=$(date +%s)
  timeout "$limit" python3 -m bench.gpu.paired --scratch "$tmp/shapes" --rounds "$rounds" \
    --cell-seconds "$seconds" --out "$out/$name.json" "$@" > "$out/$name.log" 2>&1
  echo "$name: exit $? after $(( $(date +%s) - start )) s"; grep -E ' s +[+-].*rounds|MISSES|Error' "$out/$name.log" | tail -16
}
for run in $runs; do
  case $run in
    qwen)      limit=${LIMIT:-1800} rounds=${ROUNDS:-40} seconds=${CELL_SECONDS:-300} \
                 pair speed-qwen2.5-3b --model qwen2.5-3b --passes 8 \
                 --cells noise all-layers generated mean cap add last ablate zero-layer watch twin \
                 --rounds-of ${NEAR:-all-layers=130 generated=130 mean=130 cap=120 add=50 last=50 watch=50 twin=20} ;;  # every goal
    short)     # a few lines of it anew, ends one after the other, mostly prompts: five minutes
               pair speed-qwen2.5-3b-again --model qwen2.5-3b --cells noise all-layers cap add ablate --passes 2 \
                 --loads 32x512+128 32x512+32:128 32x2048+16 --profile all-layers --rounds-of noise=10 cap=24 \
                 32x512-32-128/noise=4 32x512-32-128/all-layers=12 32x512-32-128/{cap,add,ablate}=0 \
                 32x2048-16/all-layers=6 32x2048-16/{noise,cap,add,ablate}=0 ;;
    one)       pair speed-qwen2.5-3b-one --model qwen2.5-3b --cells noise one-layer add:one add:same cap:one ablate:same ;;
    eager)     pair speed-qwen2.5-3b-eager --model qwen2.5-3b --eager --decode 16 --cells $some ;;
    quick)     pair speed-qwen2.5-3b --model qwen2.5-3b --cells noise zero-layer all-layers add ;;
    llm)       pair speed-qwen2.5-3b-llm --model qwen2.5-3b --baseline llm --cells noise zero-layer all-layers ;;
    process)   pair speed-qwen2.5-3b-process --model qwen2.5-3b --core process --cells $some ;;
    noop)      pair speed-qwen2.5-3b-noop --model qwen2.5-3b --noop --cells noise zero-layer ;;
    llama-8b)  pair speed-llama-8b --model llama-8b --cells $some ;;
    llama-1b)  pair speed-llama-1b --model llama-1b --cells $some ;;
    loads)     # ends one after the other, mostly prompts, other batches; a pair of engines for three of them
               limit=${LIMIT:-900} pair speed-qwen2.5-3b-loads --model qwen2.5-3b --cells $some \
                 --loads 32x512+128 32x512+32:128 32x2048+16
               limit=${LIMIT:-900} pair speed-qwen2.5-3b-batches --model qwen2.5-3b --cells $some \
                 --loads 1x512+128 64x512+128 256x512+128 ;;
    room)      pair speed-qwen2.5-3b-room --model qwen2.5-3b --pool-bytes 5800000000 --loads 64x512+128 256x512+128 \
                 --cells noise all-layers ;;
    peer)      pair speed-qwen2.5-3b-peer --model qwen2.5-3b --utilisation 0.5 --cells noise all-layers hidden-states ;;
    lens)      python3 -m bench.gpu.lens_kernel --out "$out/kernel-lenses.json" > "$out/kernel-lenses.log" 2>&1
               echo "kernel-lenses: exit $?"; tail -140 "$out/kernel-lenses.log"
               for size in "267 --compile 8" "7947 --rounds 3 --levels="; do
                 set -- $size
                 python3 -m bench.lens_speed --device cuda --hidden 2560 --lenses "$@" \
                   --out "$out/lens-$1.json" > "$out/lens-$1.log" 2>&1
                 echo "lens-$1: exit $?"; tail -44 "$out/lens-$1.log"
               done ;;
    fast)      timeout "$limit" python3 -m bench.gpu.fast_paths --scratch "$tmp/shapes" --out "$out/fast-paths.json" \
                 > "$out/fast-paths.log" 2>&1
               echo "fast-paths: exit $?"; tail -60 "$out/fast-paths.log" ;;
    profile)   pair profile --model qwen2.5-3b --cells --profile zero-layer all-layers add ;;
    *) echo "unknown run: $run" ;;
  esac
done
