"""Compile a watch's rules to numbers for the device.

Each single condition is a term: a lens, two bounds, and the number of rows for which it must have held. The terms that
hold on a row are the bits of one integer. A combination is a list of clauses and holds if for one of them all
`positive` bits are set and no `negative` one is. So every rule costs a few integer operations.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from steerscope.lenses.pack import Pack
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.watch import AllOf, AnyOf, Condition, Not, Rule, Steer, When

MOST_TERMS, MOST_RULES, MOST_CLAUSES = 32, 8, 16  # of one request; terms are bits of an int64
_NOWHERE = float("inf")

Kind = Literal["flag", "stop", "steer"]
Clause = tuple[int, int]  # positive and negative bits


@dataclass(frozen=True, slots=True)
class Term:
    """Holds where `above` < score < `below` has held for `need` rows."""

    lens: int
    above: float
    below: float
    need: int


@dataclass(frozen=True, slots=True)
class CompiledRule:
    name: str
    kind: Kind
    clauses: tuple[Clause, ...]
    off: int | None  # bits that must all be set to switch it off; None: the clauses must fail
    off_for: int
    lenses: tuple[int, ...]  # of the condition, in its order


@dataclass(slots=True)
class Compiled:
    """The compiled rules of one watch, which share `terms`."""

    terms: list[Term] = field(default_factory=list)
    rules: list[CompiledRule] = field(default_factory=list)

    def bit(self, term: Term) -> int:
        """Return the bit of a term, which is added if it is new."""
        if term not in self.terms:
            self.terms.append(term)
        return 1 << self.terms.index(term)


def compile_rules(
    rules: Sequence[Rule], pack: Pack, readable: Callable[[int], bool] = lambda _: True
) -> tuple[Compiled, list[Problem]]:
    """Return compiled rules and their problems. `readable` tells whether a lens is scored on every row."""
    made, problems = Compiled(), []
    for i, rule in enumerate(rules):
        found = _problems(rule, pack, readable)
        problems += [problem.under(f"rules[{i}]") for problem in found]
        if found:
            continue
        try:
            made.rules.append(_rule(made, rule, pack))
        except InvalidRequest as error:
            problems += [problem.under(f"rules[{i}].when") for problem in error.problems]
    if len(rules) > MOST_RULES:
        problems.append(Problem("rules", f"are {len(rules)}", f"give at most {MOST_RULES}"))
    if len(made.terms) > MOST_TERMS:
        what = f"hold {len(made.terms)} different conditions"
        problems.append(Problem("rules", what, f"use at most {MOST_TERMS} in one watch"))
    return made, problems


def _problems(rule: Rule, pack: Pack, readable: Callable[[int], bool]) -> list[Problem]:
    found: list[Problem] = []
    for path, leaf in rule.when.leaves():
        where = f"when.{path}" if path else "when"
        try:
            lens = pack.index(leaf.concept)
        except InvalidRequest as error:
            found += [problem.under(where) for problem in error.problems]
            continue
        found += [problem.under(where) for problem in _threshold_problems(leaf, pack, lens)]
        if not readable(lens):
            what = f"{leaf.concept!r} is not always on the device"
            found.append(Problem(f"{where}.concept", what, "register the pack with it in pinned"))
    return found


def _threshold_problems(leaf: When, pack: Pack, lens: int) -> list[Problem]:
    """Refuse bounds that no score can pass: the rule would silently never fire, or always."""
    if pack.info.architecture.output != "sigmoid" and pack.calibration is None:
        return []  # activations have no upper end
    calibration = pack.calibration
    most = 1.0 if calibration is None else float(calibration.confidence[lens])
    why = "probabilities end at 1" if most == 1.0 else f"the scores of {leaf.concept!r} end at {most:.3g}"
    found = []
    if leaf.above is not None and leaf.above >= most:
        found.append(Problem("above", f"{leaf.above:g} is never passed: {why}", "choose a smaller value"))
    if leaf.below is not None and leaf.below > most:
        found.append(Problem("below", f"every score is below {leaf.below:g}: {why}", "choose a smaller value"))
    return found


def _rule(made: Compiled, rule: Rule, pack: Pack) -> CompiledRule:
    condition: Condition = rule.when  # type: ignore[assignment]
    lenses = tuple(dict.fromkeys(pack.index(leaf.concept) for _, leaf in condition.leaves()))
    clauses = _clauses(made, condition, pack, negated=False)
    if not clauses:
        raise InvalidRequest([Problem("", "the condition contradicts itself and can never hold", "change it")])
    action, off, off_for = rule.then, None, 1
    if isinstance(action, Steer):
        off_for = action.off_for
        if action.off_below is not None:
            bits = (made.bit(Term(lens, -_NOWHERE, action.off_below, 1)) for lens in lenses)
            off = sum({*bits})
    return CompiledRule(rule.name, action.kind, tuple(clauses), off, off_for, lenses)


def _clauses(made: Compiled, condition: Condition, pack: Pack, negated: bool) -> list[Clause]:
    """Return the condition, or its opposite, as clauses of which one must hold."""
    if isinstance(condition, Not):
        return _clauses(made, condition.of, pack, not negated)  # type: ignore[arg-type]
    if isinstance(condition, When):
        above = -_NOWHERE if condition.above is None else condition.above
        below = _NOWHERE if condition.below is None else condition.below
        bit = made.bit(Term(pack.index(condition.concept), above, below, condition.for_tokens))
        return [(0, bit) if negated else (bit, 0)]
    assert isinstance(condition, AllOf | AnyOf)
    parts = [_clauses(made, part, pack, negated) for part in condition.of]  # type: ignore[arg-type]
    together = isinstance(condition, AllOf) != negated
    found = _product(parts) if together else list(itertools.chain(*parts))
    return _limited(found)


def _product(parts: list[list[Clause]]) -> list[Clause]:
    found: list[Clause] = [(0, 0)]
    for part in parts:
        pairs = itertools.product(found, part)
        found = _limited([(p | q, n | m) for (p, n), (q, m) in pairs])
    return found


def _limited(clauses: list[Clause]) -> list[Clause]:
    kept = list(dict.fromkeys(clause for clause in clauses if not clause[0] & clause[1]))
    if len(kept) > MOST_CLAUSES:
        what = f"the combination has more than {MOST_CLAUSES} alternatives"
        raise InvalidRequest([Problem("", what, "split it into several rules")])
    return kept
