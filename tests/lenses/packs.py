"""Packs for tests, and lenses run one by one: the oracle that knows nothing of stacks."""

import torch
from torch import Tensor, nn

from steerscope.lenses import Architecture, Concept, Pack, PackInfo
from steerscope.lenses.tensors import layout


def tree(counts: list[int], seed: int = 0, second_parents: float = 0.2) -> list[Concept]:
    """Concepts, `counts` of them per level, under random parents, some under two, in a shuffled order."""
    draw = torch.Generator().manual_seed(seed)

    def pick(n: int) -> int:
        return int(torch.randint(n, (), generator=draw))

    concepts: list[Concept] = []
    for level, count in enumerate(counts):
        for i in range(count):
            parents = [f"c{level - 1}.{pick(counts[level - 1])}"] if level else []
            if level and torch.rand((), generator=draw) < second_parents:
                parents.append(f"c{level - 1}.{pick(counts[level - 1])}")
            concepts.append(Concept(id=f"c{level}.{i}", level=level, parents=tuple(dict.fromkeys(parents))))
    return [concepts[i] for i in torch.randperm(len(concepts), generator=draw)]


def info(hidden: int = 24, widths: tuple[int, ...] = (8, 5), **more: object) -> PackInfo:
    architecture = Architecture(widths=widths, output=more.pop("output", "sigmoid"), k=more.pop("k", None))  # type: ignore[arg-type]
    return PackInfo(name="test", model="org/model", hidden=hidden, layer=3, architecture=architecture, **more)  # type: ignore[arg-type]


def weights(about: PackInfo, lenses: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in layout(about, lenses).items():
        scale = 2.0 * shape[-1] ** -0.5 if name.startswith("w") else 0.5
        found[name] = (torch.randn(shape, generator=draw) * scale).to(dtype)
    return found


def make(
    counts: list[int] | None = None,
    *,
    seed: int = 0,
    normed: bool = False,
    calibrated: bool = False,
    dtype: torch.dtype = torch.float32,
    concepts: list[Concept] | None = None,
    **about: object,
) -> Pack:
    concepts = concepts or tree(counts or [3, 6, 12], seed)
    lenses, facts = len(concepts), info(**about)  # type: ignore[arg-type]
    tensors = weights(facts, lenses, seed, dtype)
    draw = torch.Generator().manual_seed(seed + 1)
    if normed:
        tensors["normed"] = torch.rand(lenses, generator=draw) < 0.5
    if calibrated:
        tensors["low"] = torch.rand(lenses, generator=draw) * 0.4
        tensors["high"] = tensors["low"] + 0.1 + torch.rand(lenses, generator=draw) * 0.4
        tensors["confidence"] = 0.5 + torch.rand(lenses, generator=draw) / 2
        tensors["floor"] = torch.rand(lenses, generator=draw) * 0.2
    return Pack(facts, concepts, tensors)


def rows(n: int, hidden: int = 24, seed: int = 5) -> Tensor:
    return torch.randn(n, hidden, generator=torch.Generator().manual_seed(seed)) * 3 + 0.7


def alone(pack: Pack, i: int) -> nn.Sequential:
    """Lens i as modules, up to its probability."""
    steps: list[nn.Module] = []
    hidden = pack.info.hidden
    if pack.info.normalisation == "layernorm":
        steps.append(nn.LayerNorm(hidden, elementwise_affine=False))
    if "normed" in pack.tensors and pack.tensors["normed"][i]:
        steps.append(nn.LayerNorm(hidden, elementwise_affine=False))
    sizes = [hidden, *pack.info.architecture.widths, 1]
    for layer, (into, out) in enumerate(zip(sizes, sizes[1:], strict=False)):
        linear = nn.Linear(into, out)
        linear.weight.data = pack.tensors[f"w{layer}"][i].float()
        linear.bias.data = pack.tensors[f"b{layer}"][i].float()
        steps += [linear, nn.ReLU(), nn.Dropout(0.2)]
    output = {"sigmoid": nn.Sigmoid(), "relu": nn.ReLU(), "topk": nn.Identity()}[pack.info.architecture.output]
    return nn.Sequential(*steps[:-2], output).eval()


def one_by_one(pack: Pack, x: Tensor) -> Tensor:
    """Probabilities [n, lenses] of each lens run alone."""
    with torch.no_grad():
        return torch.cat([alone(pack, i)(x.float()) for i in range(len(pack))], dim=1)


def calibrated_by_hand(pack: Pack, probabilities: Tensor) -> Tensor:
    """Number by number, from the words of the definition."""
    result = probabilities.clone()
    for i in range(len(pack)):
        for n in range(len(result)):
            p = float(probabilities[n, i])
            score = p
            if "low" in pack.tensors:
                low, high, confidence = (float(pack.tensors[name][i]) for name in ("low", "high", "confidence"))
                if p < low:
                    score = 0.5 * p / low
                elif p < high:
                    score = 0.5 + 0.5 * (p - low) / (high - low)
                else:
                    score = 1.0
                score *= confidence
            if "floor" in pack.tensors and p <= float(pack.tensors["floor"][i]):
                score = 0.0
            result[n, i] = score
    return result
