"""The tables of what was measured on a GPU: `bench.paired` and `bench.taps`."""

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.gpu.paired import CELLS, GOALS
from bench.gpu.without import FAST_PATHS
from steerscope.bench.workload import steers
from steerscope.report.colours import NEUTRAL, POSITIVE
from steerscope.report.svg import HEIGHT, WIDTH, Axes, drawing

_MAIN = "speed-qwen2.5-3b.json"  # the run that has goals
AGAIN = "speed-qwen2.5-3b-again-32x512-128.json"  # some of its lines by a later version, which proves that ops act
_PEER = "speed-qwen2.5-3b-peer.json"  # and vLLM's own way to get at rows
_BEFORE = "before-*-qwen2.5-3b.json"  # others before it, in order
_SLOW_MS, _PROMPTS = 0.1, 3  # the first few read prompts
_MANY = 20  # steps, not to be named
_MUCH = 100_000_000  # bytes, of which the time of a copy says something
_FAR = 5  # percent: as far as the plot goes
REQUESTS = {
    "noise": "unmodified vLLM against itself",
    "twin": "unmodified vLLM against a second one",
    "zero-layer": "nothing requested",
    "all-layers": "every row of every layer",
    "one-layer": "every row of one layer",
    "generated": "all layers, generated tokens",
    "last": "all layers, last prompt token",
    "mean": "all layers, mean",
    "add": "add at every layer, one vector per request",
    "cap": "cap at every layer, one vector per request",
    "ablate": "ablate at every layer, one vector per request",
    "add:one": "add at one layer, one vector per request",
    "add:same": "add at every layer, one vector for all",
    "cap:one": "cap at one layer, one vector per request",
    "ablate:same": "ablate at every layer, one vector for all",
    "hidden-states": "vLLM's own `extract_hidden_states`",
    "watch": "267 lenses on every generated token",
    "watch:int8": "267 lenses in int8 on every generated token",
}


def taps(results: Path) -> str:
    """What a tap costs the GPU alone."""
    file = results / "gpu" / "taps.json"
    if not file.exists():
        return "*No figures yet: run `python -m bench.gpu.taps` where there is a GPU.*"
    data = json.loads(file.read_text())
    lines = ["| µs per layer over the norm alone | median | least and most |", "|---|---|---|"]
    for case, value in data["more_us_per_layer"].items():
        low, high = data["spread_us"][case]
        lines.append(f"| {case} | {value:+.2f} | {low:+.2f} to {high:+.2f} |")
    size = f"{data['layers']} layers, {data['tokens']} tokens of {data['hidden']}"
    run = f"{data['rounds']} rounds; {data['device']}, torch {data['torch'].partition('+')[0]}"
    lines += ["", f"{size}, the matrix products of a layer between two taps; {run}."]
    return "\n".join(lines)


def main_run(results: Path, name: str = _MAIN) -> dict:
    """Its cells in the order of CELLS, whatever order they were measured in."""
    data = json.loads((results / "gpu" / name).read_text())
    order = sorted(data["cells"], key=lambda name: CELLS.index(name) if name in CELLS else len(CELLS))
    data["cells"] = {name: data["cells"][name] for name in order}
    return data


def _shape(data: dict) -> str:
    work = data["configuration"]
    room = f", {size / 1e9:.1f} GB for rows" if (size := work.get("pool_bytes")) else ""
    room += ", eager" if work.get("eager") else ""
    room += ", taps that do nothing" if work.get("noop") else ""
    room += ", against `LLM`" if work.get("baseline") == "llm" else ""
    room += ", cores in processes of their own" if work.get("core") == "process" else ""
    tokens = f"{work['decode'] - less} to {work['decode']}" if (less := work.get("stagger")) else work["decode"]
    return f"{work['model']}, {work['batch']} × ({work['prefill']} + {tokens}){room}"


def _cells(data: dict, ending: Callable[[dict], str]) -> Iterator[str]:
    """A line for each: what was asked, both times, and how much longer ours is."""
    for name, cell in data["cells"].items():
        asked = REQUESTS.get(name, name)
        if "error" in cell:
            yield f"| {asked} | — | — | {cell['error'].splitlines()[0][:80]} | {ending(cell)} |"
            continue
        base, mine = (statistics.median(cell[key]) for key in ("baseline_s", "tapped_s"))
        yield f"| {asked} | {base:.4f} | {mine:.4f} | {interval(cell, 2)} | {ending(cell)} |"


def interval(cell: dict, digits: int, of: str = "ratio") -> str:
    over, low, high = (f"{100 * (x - 1):+.{digits}f}" for x in (cell[of]["median"], *cell[of]["interval"]))
    return f"{over} % [{low}, {high}]"


def speed(results: Path) -> str:
    """Return what each kind of request costs, next to its goal, and some of them by a later version."""
    if not (results / "gpu" / _MAIN).exists():
        return "*No figures yet: run `bench/gpu/speed.sh` where there is a GPU.*"
    found = [_speed(main_run(results), "")]
    if (results / "gpu" / AGAIN).exists():
        found.append(_speed(main_run(results, AGAIN), ", again"))
    return "\n\n".join(found)


def _speed(data: dict, which: str) -> str:
    times = "unmodified, s | steerscope, s | overhead, 95 % interval"
    head = f"| request | {times} | goal | drift | copies, GB/s | same texts |"
    lines = [f"**{_shape(data)}{which}**", "", head, "|---" * 8 + "|", *_cells(data, _goals)]
    rounds = [cell["rounds"] for cell in data["cells"].values() if "rounds" in cell]
    versions = ", ".join(f"{name} {data['versions'][name]}" for name in ("vllm", "torch") if name in data["versions"])
    lines += ["", f"At least {min(rounds, default=0)} rounds; {data['engines'].get('ours', {}).get('mode')}; "]
    lines[-1] += f"{data['hardware']['gpu']}, {versions}."
    return "\n".join(lines)


def pairs(results: Path) -> str:
    """Every pair of the run in the speed table, also those that were measured again, and of runs before it."""
    if not (results / "gpu" / _MAIN).exists():
        return "*No figures yet.*"
    before = sorted((results / "gpu").glob(_BEFORE), reverse=True)
    others: list[dict[str, dict]] = [json.loads(file.read_text())["cells"] for file in before]
    now: dict[str, dict] = main_run(results)["cells"]
    heads = "".join(f" {i + 1} before it |" for i in range(len(others)))
    lines = [f"| every pair | this run | goal |{heads}", "|---" * (len(others) + 3) + "|"]
    for name, cell in now.items():
        whole: dict = {}
        if name in GOALS and "error" not in cell:
            whole = {"goal": GOALS[name], "holds": cell["ratio_of_all"]["interval"][1] <= GOALS[name]}
        shown = [_alone(run[name]) if name in run else "" for run in others]
        lines.append(f"| {' | '.join([REQUESTS.get(name, name), _alone(cell), _goal(whole), *shown])} |")
    return "\n".join(lines)


def _alone(cell: dict) -> str:
    if "error" in cell:
        return cell["error"].splitlines()[0][:80]
    return f"{interval(cell, 2, 'ratio_of_all')}, {len(cell['baseline_s']) + len(cell['measured_again'])} pairs"


def _goal(cell: dict) -> str:
    if "goal" not in cell:
        return ""
    return f"≤ {100 * (cell['goal'] - 1):+.1f} %: {'holds' if cell['holds'] else '**missed**'}"


def _goals(cell: dict) -> str:
    if "drift" not in cell:
        return " | | | "
    fetch, drift = "", f"{100 * cell['drift']:+.1f} %"
    if cell.get("bytes", 0) >= _MUCH and cell.get("fetch_gb_per_s"):
        fresh = cell.get("fetch_fresh_gb_per_s")
        fetch = f"{cell['fetch_gb_per_s']:.1f}" + (f"; {fresh:.1f}" if fresh else "")
    if "fetch_goal" in cell:
        fetch += f" (goal ≥ {cell['fetch_goal']:.0f})"
        drift += f" (goal ≤ {100 * cell['drift_goal']:.0f} %)"
    return f"{_goal(cell)} | {drift} | {fetch} | {100 * cell['same_tokens']:.1f} %"


def shapes(results: Path) -> str:
    """Other models and batches, which have no goals."""
    found = sorted((results / "gpu").glob("speed*.json"), key=lambda file: file.stem)
    files = [file for file in found if file.name not in (_MAIN, AGAIN, _PEER)]
    head = "| shape | request | unmodified, s | steerscope, s | overhead, 95 % interval | a step waited, ms | rounds |"
    lines = [head, "|---" * 7 + "|"]
    for file in files:
        shape = _shape(data := json.loads(file.read_text())) + (", again" if file.stem.endswith("-again") else "")
        lines += [f"| {shape} {line}" for line in _cells(data, _waited)]
    return "\n".join(lines) if files else "*No figures yet.*"


def _waited(cell: dict) -> str:
    """For room on the device, in a round."""
    return f"{1e3 * cell['stall_s']:.0f} | {cell['rounds']}" if "stall_s" in cell else f" | {cell.get('rounds', '')}"


def hidden_states(results: Path) -> str:
    """vLLM's own way to get at rows, beside ours."""
    if not (results / "gpu" / _PEER).exists():
        return "*No figures yet: run `bench/gpu/speed.sh OUT peer` where there is a GPU.*"
    data = json.loads((results / "gpu" / _PEER).read_text())

    def ending(cell: dict) -> str:
        if "phases" not in cell:
            return " | | "
        rows = f"{cell['rows']:,} ({cell['bytes'] / 1e9:.2f} GB)" if cell.get("rows") else ""
        return f"{cell['phases']['tapped']['step']:.2f} | {rows} | {cell['rounds']}"

    head = "| request | unmodified, s | this way, s | overhead, 95 % interval | step, ms | rows | rounds |"
    return "\n".join([f"**{_shape(data)}**", "", head, "|---" * 7 + "|", *_cells(data, ending)])


def proven_cells(results: Path) -> dict[str, tuple[dict, bool]]:
    """Return each cell, and whether it is of the later run: ops are taken from the run that shows that they act."""
    again = main_run(results, AGAIN)["cells"] if (results / "gpu" / AGAIN).exists() else {}
    found = {}
    for name, cell in main_run(results)["cells"].items():
        if "ratio" in cell:
            is_later = steers(name) and not cell.get("verified") and name in again
            found[name] = (again[name] if is_later else cell, is_later)
    return found


def costs(results: Path) -> str:
    """Return how much longer a batch takes with each kind of request."""
    data = main_run(results)
    work, gpu = data["configuration"], data["hardware"]["gpu"]
    size = f"{work['batch']} requests of {work['prefill']} + {work['decode']} tokens, {work['model']} on one {gpu}"
    lines = [f"| {size} | longer than unmodified vLLM, 95 % interval |", "|---|---|"]
    for name, (cell, is_later) in proven_cells(results).items():
        if name not in ("noise", "twin"):
            where = " (another run)" if is_later else ""
            lines.append(f"| {REQUESTS.get(name, name)}{where} | {interval(cell, 1)} |")
    if (results / "gpu" / _PEER).exists():
        own = json.loads((results / "gpu" / _PEER).read_text())["cells"]["hidden-states"]
        asked = f"all layers but the last, by {REQUESTS['hidden-states']} (another run)"
        lines.append(f"| {asked} | {interval(own, 1)} |")
    return "\n".join(lines)


def phases(results: Path) -> str:
    """Where in a round the difference to unmodified vLLM arises."""
    if not (results / "gpu" / _MAIN).exists():
        return "*No figures yet.*"
    data = main_run(results)
    cells = {name: cell for name, cell in data["cells"].items() if "phases" in cell}
    names = list(next(iter(cells.values()))["phases"]["tapped"])
    head = f"| ms more than unmodified vLLM | {' | '.join(names)} | rounds | it starts in |"
    lines = [head, "|---" * (len(names) + 3) + "|"]
    for name, cell in cells.items():
        base, mine = cell["phases"]["baseline"], cell["phases"]["tapped"]
        shown = " | ".join(f"{mine[part] - base[part]:+.2f}" for part in names)
        lines.append(f"| {REQUESTS.get(name, name)} | {shown} | {cell['rounds']} | {base.get('starting', 0.0):.1f} |")
    return "\n".join(lines)


def steps(results: Path) -> str:
    """How even the difference is from step to step, while texts are written."""
    if not (results / "gpu" / _MAIN).exists():
        return "*No figures yet.*"
    off = f"of it in those {1e3 * _SLOW_MS:.0f} µs off, ms"
    head = f"| more than unmodified vLLM | whole round | median step, µs | all steps, ms | {off} | which |"
    lines = [head, "|---" * 6 + "|"]
    for name, cell in main_run(results)["cells"].items():
        if "steps_ms" not in cell:
            continue
        both = zip(cell["steps_ms"]["tapped"], cell["steps_ms"]["baseline"], strict=False)
        more = {i: mine - base for i, (mine, base) in enumerate(both) if i >= _PROMPTS}
        slow = {i: ms for i, ms in more.items() if abs(ms) > _SLOW_MS}
        shown = ", ".join(str(i) for i in slow) if len(slow) <= _MANY else f"{len(slow)} of {len(more)}"
        middle = (
            f"{1e3 * statistics.median(more.values()):+.0f} | {sum(more.values()):+.1f} | {sum(slow.values()):+.1f}"
        )
        lines.append(f"| {REQUESTS.get(name, name)} | {interval(cell, 2)} | {middle} | {shown or 'none'} |")
    return "\n".join(lines)


def plot(results: Path) -> str:
    """Whether a run drifts: how much longer each round was, with the median of each third."""
    cells = main_run(results)["cells"]
    panels = [_rounds(cells[name], REQUESTS[name]) for name in ("noise", "zero-layer", "all-layers") if name in cells]
    content = [f'<g transform="translate({i * WIDTH} 0)">{panel}</g>' for i, panel in enumerate(panels)]
    return drawing("".join(content), WIDTH * len(panels), HEIGHT)


def _rounds(cell: dict, title: str) -> str:
    more = [100 * (ratio - 1) for ratio in cell["ratio"]["rounds"]]
    axes, third = Axes((0, len(more)), (-_FAR, _FAR)), len(more) // 3
    parts = [axes.frame(f"{title}: longer by, %", "round", range(0, len(more) + 1, 20), [-4, -2, 0, 2, 4])]
    # What is further off lies on the edge, so that it is seen.
    parts.append(axes.dots([(i, max(-_FAR, min(_FAR, one))) for i, one in enumerate(more)], NEUTRAL, 2.5, 0.6))
    for start in (0, third, len(more) - third):
        middle = statistics.median(more[start : start + third])
        parts.append(axes.curve([(start, middle), (start + third, middle)], POSITIVE))
    return "".join(parts)


def hooks(results: Path) -> str:
    """What our code does on the host in a step, from the profiles."""
    lines = []
    for file in sorted((results / "gpu").glob("profile*.json")):
        data = json.loads(file.read_text())["profile"]
        asked = REQUESTS.get(data["cell"], data["cell"])
        lines += ["", f"| host work per step, {asked} | µs | calls | median call, µs |", "|---" * 4 + "|"]
        for name, one in list(data["hooks"].items())[:8]:
            times = f"{one['us_per_step']:.1f} | {one['calls_per_step']:.2g} | {one['median_call_us']:.1f}"
            lines.append(f"| `{name}` | {times} |")
    return "\n".join(lines).strip() or "*No profile yet: `bench/gpu/speed.sh OUT profile`.*"


_STREAMS = {
    "stock-http": "`vllm serve`",
    "ours-http": "`steerscope serve`",
    "stock-library": "vLLM's `AsyncLLM`",
    "ours-library": "steerscope's engine",
}


def streams(results: Path) -> str:
    """Streams of stock vLLM and of steerscope, each with its own defaults."""
    data = json.loads((results / "gpu" / "streams.json").read_text())
    lines = ["| streams | server or library | tokens/s | first token: p50, p99, ms | time / stock (95 %) |"]
    lines.append("|---|---|---|---|---|")
    for cell in data["cells"]:
        for kind, one in cell["summary"].items():
            first = f"{1e3 * one['first_token_p50_s']:.0f}, {1e3 * one['first_token_p99_s']:.0f}"
            ratio = one.get("time_ratio")
            told = "{:.3f} ({:.3f}–{:.3f})".format(ratio["median"], *ratio["interval"]) if ratio else ""
            lines.append(
                f"| {cell['streams']} | {_STREAMS[kind]} | {round(one['tokens_per_s'], -1):,.0f} | {first} | {told} |"
            )
    work = data["configuration"]
    n_rounds = [min(map(len, cell["rounds"].values())) for cell in data["cells"]]
    lines += [
        "",
        f"{work['shape']} shape, {work['dtype']}, {work['prompt']} + {work['tokens']} tokens, nothing steered or "
        f"captured; {', '.join(map(str, n_rounds))} rounds in turns on one {data['hardware']['gpu']}, "
        f"vLLM {data['versions']['vllm']}.",
    ]
    return "\n".join(lines)


def fast_paths(results: Path) -> str:
    """Return what a round takes longer without each fast path, and which of them stayed."""
    data = json.loads((results / "gpu" / "fast-paths.json").read_text())
    lines = ["| fast path | request | a round without it | |", "|---|---|---|---|"]
    for cell, found in data["cells"].items():
        again = found["without"]["everything again"]
        lines.append(f"| *none: the same engine twice* | {REQUESTS.get(cell, cell)} | {interval(again, 2)} | |")
    beside = {
        name: {cell: one["without"][name] for cell, one in cells.items()} for name, cells in data["engines"].items()
    }
    for name, one in data["what"].items():
        inside = {cell: found["without"][name] for cell, found in data["cells"].items() if name in found["without"]}
        decision = "stays" if name in FAST_PATHS else "taken out"
        for cell, ratio in (inside | beside.get(name, {})).items():
            lines.append(f"| {one['what']} | {REQUESTS.get(cell, cell)} | {interval(ratio, 2)} | {decision} |")
    work = data["configuration"]
    load = f"{work['model']}, {work['batch']} × ({work['prefill']} + {work['decode']})"
    lines += ["", f"{load}; {work['rounds']} rounds in turns inside one engine; {data['hardware']['gpu']}."]
    return "\n".join(lines)
