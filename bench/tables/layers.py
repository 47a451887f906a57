"""Tables of docs/analysis.md about MLPs and attention, from the results of layers_study."""

import json
from pathlib import Path


def calibration(results: Path) -> str:
    data = json.loads((results / "layers_study.json").read_text())["calibration"]
    lines = ["| beyond \\|z\\| = 3, all layers (worst layer) | z here | plain z |", "|---|---|---|"]
    for name in (name for name in data if not name.endswith("(plain)")):
        plain = data.get(f"{name} (plain)")
        lines.append(f"| {name} | {_share(data[name])} | {_share(plain) if plain else '—'} |")
    return "\n".join(lines)


def _share(found: dict[str, float]) -> str:
    return f"{found['mean']:.2f} % ({found['worst']:.2f} %)"


def passes(results: Path) -> str:
    """What both passes say about the tuned copy."""
    data = json.loads((results / "layers_study.json").read_text())
    mlp, attention = data["mlp"], data["attention"]
    rows = []
    for what, found in (("MLP", mlp), ("attention", attention)):
        focus = found["focus"]
        rows.append(
            (f"{what}: layers of the largest absolute and angular change", f"{focus['change']}, {focus['turn']}")
        )
    for measure in ("change", "turn"):
        first = ", ".join(f"{row['name']} ({row['mean']:.3g})" for row in mlp["first"][measure])
        rows.append((f"MLP: directions with the largest mean {measure} over layers", first))
    for found, measures in ((mlp, ("change", "parallel")), (attention, ("self", "write"))):
        for test in found["groups"]:
            if (test["a"], test["b"]) == ("roles", "traits") and test["measure"] in measures:
                means = f"{test['mean_a']:.3g}, {test['mean_b']:.3g}; t {test['t']:+.2f}, p {test['p']:.2g}"
                rows.append((f"roles against traits, mean {test['measure']}", means))
    for by, what in (("z", "affinity"), ("z_change", "change")):
        one = attention["top"][by][0]
        place = f"layer {one['layer']}, head {one['head']}: {one['query']} → {one['key']}, z {one[by]:+.1f}"
        rows.append((f"most extreme {what} of a single head", place))
    significant = attention["significant"]
    rows.append((f"pairs and layers with p < 0.05, of {attention['pairs']}: affinity, change",
                 f"{significant['p']}, {significant['p_change']}"))  # fmt: skip
    rows.append(("… of these directions with themselves", "{p}, {p_change}".format(**attention["selves"])))
    for what, found in (("MLP", mlp), ("attention", attention)):
        scores = ", ".join("{} {:.1f} ({:.1f})".format(name, *one.values()) for name, one in found["contrast"].items())
        rows.append(
            (f"{what}: change along the direction, mean \\|z\\| over layers (against exchanged labels)", scores)
        )
    seconds = [found["seconds"] for found in (mlp, attention)]
    times = ", ".join(f"{one['processor']:.0f} ({one['clock']:.0f})" for one in seconds)
    rows.append(("MLP and attention, seconds of the processor (and of the clock, on a very busy machine)", times))
    study = json.loads((results / "analysis_study.json").read_text())["seconds"].values()
    whole = sum(one["processor"] for one in (*study, *seconds))
    rows.append(("from the untouched model to the page, all that is above: seconds of the processor", f"{whole:.0f}"))
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
