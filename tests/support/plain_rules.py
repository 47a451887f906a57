"""Rules in plain Python, row by row, from the words of their definition: the oracle for the tensors."""

from collections.abc import Mapping, Sequence

from steerscope.specs.watch import AllOf, AnyOf, Condition, Not, Rule, Steer, When

Event = tuple[int, int, str]  # row, rule, on or off


class PlainRule:
    def __init__(self, rule: Rule) -> None:
        self.rule, self.on = rule, False
        self._held = {id(leaf): 0 for _, leaf in rule.when.leaves()}
        self._off = 0

    def _true(self, condition: Condition) -> bool:
        match condition:
            case When():
                return self._held[id(condition)] >= condition.for_tokens
            case AllOf():
                return all(self._true(part) for part in condition.of)  # type: ignore[arg-type]
            case AnyOf():
                return any(self._true(part) for part in condition.of)  # type: ignore[arg-type]
            case Not():
                return not self._true(condition.of)  # type: ignore[arg-type]

    def see(self, scores: Mapping[str, float]) -> str | None:
        """What one more row changes."""
        leaves = [leaf for _, leaf in self.rule.when.leaves()]
        for leaf in leaves:
            score = scores[leaf.concept]
            inside = (leaf.above is None or score > leaf.above) and (leaf.below is None or score < leaf.below)
            self._held[id(leaf)] = self._held[id(leaf)] + 1 if inside else 0
        holds = self._true(self.rule.when)  # type: ignore[arg-type]
        action, low = self.rule.then, not holds
        if isinstance(action, Steer) and action.off_below is not None:
            low = all(scores[leaf.concept] < action.off_below for leaf in leaves)
        self._off = self._off + 1 if low else 0
        before = self.on
        if holds:
            self.on = True
        elif self._off >= (action.off_for if isinstance(action, Steer) else 1):
            self.on = False
        return None if self.on == before else "on" if self.on else "off"


def play(rules: Sequence[Rule], rows: Sequence[Mapping[str, float]]) -> tuple[list[Event], list[list[bool]]]:
    """What happens, and the state of every rule after each row."""
    running = [PlainRule(rule) for rule in rules]
    events: list[Event] = []
    states: list[list[bool]] = []
    for t, scores in enumerate(rows):
        for r, one in enumerate(running):
            change = one.see(scores)
            if change:
                events.append((t, r, change))
        states.append([one.on for one in running])
    return events, states
