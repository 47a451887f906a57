"""Expansion again, one row at a time with dictionaries: shares no line with the product."""

from torch import Tensor

from steerscope.lenses import Pack


def slow_expand(
    pack: Pack, scores: Tensor, base_levels: int, top_k: int, depth: int
) -> tuple[dict[int, float], list[int]]:
    """From the scores of one row on all lenses: those that expansion would look at, and the concepts it reports."""
    place = {concept.id: i for i, concept in enumerate(pack.concepts)}
    children: dict[int, set[int]] = {i: set() for i in range(len(pack))}
    for i, concept in enumerate(pack.concepts):
        for parent in concept.parents:
            children[place[parent]].add(i)
    seen = {i: float(scores[i]) for i, concept in enumerate(pack.concepts) if concept.level < base_levels}
    expanded: set[int] = set()

    def best() -> list[int]:
        return [i for i in sorted(seen, key=lambda i: (-seen[i], i))[:top_k] if seen[i] > 0]

    for _ in range(depth):
        fresh = [lens for lens in best() if lens not in expanded]
        expanded.update(fresh)
        for lens in fresh:
            for child in children[lens]:
                seen[child] = float(scores[child])
    top = best()
    return seen, [lens for lens in top if not children[lens] & set(top)]
