"""Rules: compile those of a watch to numbers, and follow on the device which of each watched request hold, row by row.

**Compiled.** Each single condition is a term: a lens, two bounds, and the number of rows for which it must have held.
The terms that hold on a row are the bits of one integer. A combination is a list of clauses and holds if for one of
them all `positive` bits are set and no `negative` one is. So every rule costs a few integer operations.

**On the device.** All tables are tensors of fixed shapes. `advance` takes the rows of one step, of any number of
requests; it never synchronises and no shape depends on a value, so that it can be captured in a CUDA graph. Rows of a
request are consecutive and ascending; how they are cut into steps does not change any result.

A rule is a latch. It goes on with the row on which its condition holds, and off when its off-condition has held for
`off_for` rows; both changes are reported. `gates` hold the state after the last row, and gated columns read them in the
next step, so steering acts from the row after the one on which its rule fired.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from steerscope.lenses.pack import Pack
from steerscope.specs.errors import CapacityExceeded, InvalidRequest, Problem
from steerscope.specs.watch import AllOf, AnyOf, Condition, Not, Rule, Steer, When

# of one request; terms are bits of an int64
MOST_TERMS = 32
MOST_RULES = 8
MOST_CLAUSES = 16
_NOWHERE = float("inf")
_NEVER = 1 << 62  # a bit that no row sets

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
    made = Compiled()
    problems = []
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
    action = rule.then
    off = None
    off_for = 1
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


# --- on the device


class Changes(NamedTuple):
    """Rules [n, rules] of each row's request that went on with this row, and that went off."""

    on: Tensor
    off: Tensor


class Rules:
    """Tables and states by slot. Slot 0 is for rows without rules, and padding.

    `slots` is the number of requests that can have rules at a time.
    """

    def __init__(self, device: str | torch.device = "cpu", slots: int = 64) -> None:
        self.slots = slots
        self.device = torch.device(device)
        s = slots + 2
        t = MOST_TERMS
        r = MOST_RULES
        c = MOST_CLAUSES
        self._trash = s - 1  # slot whose states are never read

        def full(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=self.device)

        self.column = full((s, t), 0, torch.long)  # of a term's score
        self.above = full((s, t), torch.inf, torch.float32)
        self.below = full((s, t), torch.inf, torch.float32)
        self.need = full((s, t), 1, torch.int32)
        self.positive = full((s, r, c), _NEVER, torch.long)
        self.negative = full((s, r, c), 0, torch.long)
        self.off_bits = full((s, r), _NEVER, torch.long)
        self.off_by_failing = full((s, r), 1, torch.bool)
        self.off_need = full((s, r), 1, torch.int32)
        self.run = full((s, t), 0, torch.int32)  # number of rows on which a term has held until now
        self.quiet = full((s, r), 0, torch.int32)  # likewise for off-conditions
        self.on = full((s, r), 0, torch.bool)
        self.next = full((s,), 0, torch.long)  # positions below this have been seen
        self.gates = full((s * r,), 0, torch.float32)  # gate 0 is the constant 1
        self.gates[0] = 1.0
        self._weights = 1 << torch.arange(t, device=self.device)
        self._free = list(range(slots, 0, -1))

    # --- slots

    def admit(self, compiled: Compiled, columns: list[int]) -> int:
        """Return a slot for these rules; `columns` are the columns of the terms' scores."""
        if not self._free:
            what = f"all {self.slots} places for requests with rules are taken"
            raise CapacityExceeded(f"{what}: wait for some to finish, or start the engine with a larger batch")
        slot = self._free.pop()  # cleared when it was released
        self._write(slot, compiled, columns)
        return slot

    def release(self, slot: int) -> None:
        self._clear(slot)
        self._free.append(slot)

    def restart(self, slot: int) -> None:
        """Forget the rows so far; the rules stay."""
        for state in (self.run, self.quiet, self.on, self.next, self._gates()):
            state[slot] = 0

    def gate(self, slot: int, rule: int) -> int:
        """Return the gate id of a rule."""
        return slot * MOST_RULES + rule

    def _gates(self) -> Tensor:
        return self.gates.view(-1, MOST_RULES)

    def _clear(self, slot: int) -> None:
        self.restart(slot)
        self.above[slot], self.positive[slot], self.off_bits[slot] = torch.inf, _NEVER, _NEVER
        self.negative[slot], self.column[slot] = 0, 0
        self.off_by_failing[slot] = True

    def _write(self, slot: int, compiled: Compiled, columns: list[int]) -> None:
        terms = compiled.terms
        rules = compiled.rules
        count = len(terms)
        self.column[slot, :count] = torch.tensor(columns, dtype=torch.long).to(self.device)
        both = torch.tensor([[term.above, term.below] for term in terms]).reshape(-1, 2).to(self.device)
        self.above[slot, :count], self.below[slot, :count] = both[:, 0], both[:, 1]
        self.need[slot, :count] = torch.tensor([term.need for term in terms], dtype=torch.int32).to(self.device)
        padded = [(*rule.clauses, *[(_NEVER, 0)] * (MOST_CLAUSES - len(rule.clauses))) for rule in rules]
        bits = torch.tensor(padded, dtype=torch.long).reshape(-1, MOST_CLAUSES, 2).to(self.device)
        self.positive[slot, : len(rules)], self.negative[slot, : len(rules)] = bits[..., 0], bits[..., 1]
        off = [[_NEVER if rule.off is None else rule.off, rule.off is None, rule.off_for] for rule in rules]
        table = torch.tensor(off, dtype=torch.long).reshape(-1, 3).to(self.device)
        self.off_bits[slot, : len(rules)], self.off_by_failing[slot, : len(rules)] = table[:, 0], table[:, 1].bool()
        self.off_need[slot, : len(rules)] = table[:, 2].int()

    # --- the rows of a step

    @torch.no_grad()
    def advance(self, scores: Tensor, slot: Tensor, position: Tensor) -> Changes:
        """Advance rules by one step: scores [n, terms] of each row's terms, its slot [n] and its position [n].

        Rows of slot 0, and positions that were computed before, change nothing.
        """
        n = len(slot)
        if n == 0:
            nothing = torch.zeros(0, MOST_RULES, dtype=torch.bool, device=self.device)
            return Changes(nothing, nothing)
        fresh = (slot > 0) & (position >= self.next[slot])
        slot = torch.where(fresh, slot, 0)
        here = torch.arange(n, device=self.device)
        begins = torch.cat([fresh.new_ones(1), slot[1:] != slot[:-1]])
        first = torch.where(begins, here, 0).cummax(0).values  # first row of the same request
        held = (scores > self.above[slot]) & (scores < self.below[slot])
        run = _runs(held, here, first, self.run[slot])
        met = ((run >= self.need[slot]) * self._weights).sum(-1)[:, None]
        every = met.unsqueeze(-1)
        clauses = ((every & self.positive[slot]) == self.positive[slot]) & ((every & self.negative[slot]) == 0)
        holds = clauses.any(-1)
        low = (met & self.off_bits[slot]) == self.off_bits[slot]
        quiet = _runs(torch.where(self.off_by_failing[slot], ~holds, low), here, first, self.quiet[slot])
        ends = (quiet >= self.off_need[slot]) & ~holds
        state = _latch(holds, ends, here, first, self.on[slot])
        before = torch.where((here == first)[:, None], self.on[slot], state.roll(1, 0))
        self._keep(slot, position, run, quiet, state)
        return Changes(state & ~before & fresh[:, None], ~state & before & fresh[:, None])

    def _keep(self, slot: Tensor, position: Tensor, run: Tensor, quiet: Tensor, state: Tensor) -> None:
        """Store the states after the last row of each request."""
        last = torch.cat([slot[1:] != slot[:-1], slot.new_ones(1, dtype=torch.bool)])
        target = torch.where(last & (slot > 0), slot, self._trash)
        self.run[target] = run
        self.quiet[target] = quiet
        self.on[target] = state
        self.next[target] = position + 1
        self._gates()[target] = state.float()


def _runs(flags: Tensor, here: Tensor, first: Tensor, before: Tensor) -> Tensor:
    """Return for how many rows each flag [n, m] has been set in a row; `before` is that number before the step."""
    broken = torch.where(flags, -1, here[:, None]).cummax(0).values
    inside = here[:, None] - broken
    whole = here[:, None] - first[:, None] + 1 + before
    return torch.where(broken >= first[:, None], inside, whole).int()


def _latch(up: Tensor, down: Tensor, here: Tensor, first: Tensor, before: Tensor) -> Tensor:
    """Return latch states: on since the last `up` unless a later `down`, `before` if there was neither."""
    risen = torch.where(up, here[:, None], -1).cummax(0).values
    fallen = torch.where(down, here[:, None], -1).cummax(0).values
    known = torch.maximum(risen, fallen) >= first[:, None]
    return torch.where(known, risen > fallen, before)
