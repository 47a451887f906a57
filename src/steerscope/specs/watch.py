"""Watch: the lenses that read a request's rows, the number of concepts kept of each row, and rules on them.

A pack is a name registered with the engine, or a Pack object. A condition holds or not on each row; `for_tokens` is the
number of consecutive selected rows on which it must hold. No torch is imported here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, Self, runtime_checkable

from pydantic import BeforeValidator, Field, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from steerscope.specs.base import Spec, one_or_many
from steerscope.specs.steering import Ablate, Add, Cap, Steering
from steerscope.specs.tokens import Tokens


@runtime_checkable
class HasDigest(Protocol):
    """A Pack; lenses are not imported here."""

    @property
    def digest(self) -> str: ...


class InlinePack(str):
    """The name, with its digest, of a pack that is sent with the request. As JSON it is only the name, which an engine
    accepts if it has a pack with this digest."""

    pack: HasDigest

    def __new__(cls, pack: HasDigest) -> Self:
        made = super().__new__(cls, f"digest:{pack.digest}")
        made.pack = pack
        return made


def _pack(value: object, check: ValidatorFunctionWrapHandler) -> str:
    if isinstance(value, InlinePack):
        return value
    return InlinePack(value) if isinstance(value, HasDigest) else check(value)


def _one_of(kinds: "Callable[[], dict[str, type[Spec]]]", what: str) -> Callable[[object], object]:
    """Return a parser of plain data to the spec that its `kind` names. Problems are reported under its field."""

    def parse(value: object) -> object:
        known = kinds()
        if isinstance(value, tuple(known.values())):
            return value
        if isinstance(value, Spec):
            raise ValueError(f"{type(value).__name__} is not {what}; give {', '.join(known)}")
        kind = value.get("kind") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in known:
            raise ValueError(f"{value!r:.60} is not {what}; give one whose kind is {', '.join(known)}")
        try:
            return known[kind].parse(value)
        except RecursionError:
            raise ValueError(f"{what} is nested too deep; combine fewer") from None

    return parse


# An engine may allow fewer. These limits bound the work before it can refuse a list.
MOST_RULES = 64
MOST_CONDITIONS = 64

# --- conditions


class _Condition(Spec):
    def then(self, action: "Flag | Stop | Steer") -> "Rule":
        return Rule(when=self, then=action)  # type: ignore[arg-type]

    def __and__(self, other: "_Condition") -> "AllOf":
        return AllOf(of=(self, other))  # type: ignore[arg-type]

    def __or__(self, other: "_Condition") -> "AnyOf":
        return AnyOf(of=(self, other))  # type: ignore[arg-type]

    def __invert__(self) -> "Not":
        return Not(of=self)  # type: ignore[arg-type]

    def parts(self) -> "Iterable[tuple[str, _Condition]]":
        """Return the conditions that this one combines, each with its field."""
        return ()

    def leaves(self) -> Iterator[tuple[str, "When"]]:
        """Yield the single conditions, each with the path of its field inside this one."""
        if isinstance(self, When):
            yield "", self
        for field, part in self.parts():
            for path, leaf in part.leaves():
                yield f"{field}.{path}" if path else field, leaf

    def negates(self) -> bool:
        """Return whether it, or a part of it, is a `Not`."""
        return isinstance(self, Not) or any(part.negates() for _, part in self.parts())


class When(_Condition):
    """The score of a concept lies above, below, or between two values, on the last `for_tokens` rows."""

    kind: Literal["when"] = "when"
    concept: str = Field(min_length=1)
    above: float | None = Field(default=None, ge=0.0)
    below: float | None = Field(default=None, gt=0.0)
    for_tokens: int = Field(default=1, ge=1, le=1_000_000)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.above is None and self.below is None:
            raise ValueError("a condition needs above, below or both; give at least one")
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ValueError(f"no score is above {self.above:g} and below {self.below:g}; swap them")
        return self


if TYPE_CHECKING:
    ConditionField = _Condition
    Conditions = Sequence[_Condition]
else:
    _parse = BeforeValidator(_one_of(lambda: CONDITIONS, "a condition"))
    ConditionField = Annotated["When | AllOf | AnyOf | Not", _parse]
    Conditions = tuple[ConditionField, ...]


class _Several(_Condition):
    of: Conditions

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.of:
            raise ValueError("there is nothing to combine; give at least one condition")
        return self

    def parts(self) -> Iterable[tuple[str, _Condition]]:
        return [(f"of[{i}]", part) for i, part in enumerate(self.of)]


class AllOf(_Several):
    kind: Literal["all_of"] = "all_of"


class AnyOf(_Several):
    kind: Literal["any_of"] = "any_of"


class Not(_Condition):
    kind: Literal["not"] = "not"
    of: ConditionField

    def parts(self) -> Iterable[tuple[str, _Condition]]:
        return [("of", self.of)]


Condition = When | AllOf | AnyOf | Not
CONDITIONS: dict[str, type[Spec]] = {"when": When, "all_of": AllOf, "any_of": AnyOf, "not": Not}


# --- actions

Name = Annotated[str, Field(min_length=1, max_length=200)]


class Flag(Spec):
    """Report a firing each time the condition begins to hold."""

    kind: Literal["flag"] = "flag"
    name: Name


class Stop(Spec):
    """End the text with the token that was sampled from the row the rule fired on."""

    kind: Literal["stop"] = "stop"
    name: Name


class Steer(Spec):
    """Switch a steering on from the next row. It goes off when the condition has not held for `off_for` rows, or, with
    `off_below`, when all its concepts were below that value for `off_for` rows. It never acts on the prompt."""

    kind: Literal["steer"] = "steer"
    name: Name = "steer"
    steering: Steering
    off_below: float | None = Field(default=None, gt=0.0)
    off_for: int = Field(default=1, ge=1, le=1_000_000)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.steering.ops:
            raise ValueError("the steering has no ops; give at least one")
        if self.steering.reset:
            raise ValueError("a rule cannot switch off what surrounds it; give ops without reset")
        return self


Action = Flag | Stop | Steer
ACTIONS: dict[str, type[Spec]] = {"flag": Flag, "stop": Stop, "steer": Steer}
if TYPE_CHECKING:
    ActionField = Action
else:
    ActionField = Annotated[Action, BeforeValidator(_one_of(lambda: ACTIONS, "an action"))]

for _model in (AllOf, AnyOf, Not):
    _model.model_rebuild()


class Rule(Spec):
    """An action that is taken when a condition holds: `when("anger", above=0.8).then(stop("angry"))`."""

    when: ConditionField
    then: ActionField

    @property
    def name(self) -> str:
        return self.then.name

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not isinstance(self.then, Steer) or self.then.off_below is None:
            return self
        leaves = [leaf for _, leaf in self.when.leaves()]
        if any(leaf.above is None or leaf.below is not None for leaf in leaves) or self.when.negates():
            raise ValueError("off_below needs a condition made of scores above something; use off_for alone")
        highest = min(leaf.above for leaf in leaves if leaf.above is not None)
        if self.then.off_below > highest:
            raise ValueError(f"off_below {self.then.off_below:g} is over above {highest:g}; choose a smaller one")
        return self


# --- the watch


if TYPE_CHECKING:
    PackLike = str | HasDigest
    Rules = Sequence[Rule]
    Levels = Sequence[int]
else:
    PackLike = Annotated[str, WrapValidator(_pack), Field(min_length=1)]
    Rules = Annotated[tuple[Rule, ...], Field(max_length=MOST_RULES)]
    Levels = Annotated[
        tuple[Annotated[int, Field(ge=0)], ...],
        BeforeValidator(one_or_many),
        Field(min_length=1),
    ]


class Watch(Spec):
    """Read the selected rows with a lens pack: the `top_k` concepts of each row, of all or some levels.

    Rows that `tokens` leaves out are not read, and rules ignore them.

    ```python
    import steerscope as ss

    calm = ss.load_vector("happy.safetensors").add(1.7, layers=19)
    watch = ss.Watch(
        pack="concepts",
        top_k=3,
        tokens="generated",
        rules=[
            ss.when("anger", above=0.8, for_tokens=2).then(ss.stop("angry")),
            (ss.when("joy", above=0.6) & ~ss.when("irony", above=0.5)).then(ss.flag("glad")),
            ss.when("fear", above=0.7).then(ss.steer(calm, name="soothe", off_below=0.3, off_for=3)),
        ],
    )
    ```
    """

    pack: PackLike
    top_k: int = Field(default=5, ge=1, le=256)
    levels: Levels | None = None
    tokens: Tokens = "all"
    rules: Rules = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [rule.name for rule in self.rules]
        if sum(1 for rule in self.rules for _ in rule.when.leaves()) > MOST_CONDITIONS:
            raise ValueError(f"the rules have more than {MOST_CONDITIONS} conditions; use fewer")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several rules are named {', '.join(map(repr, twice))}; give each a name of its own")
        return self

    @property
    def pack_name(self) -> str:
        """The pack in normal form, a name."""
        assert isinstance(self.pack, str)
        return self.pack


# --- how users write them


def when(concept: str, above: float | None = None, for_tokens: int = 1, below: float | None = None) -> When:
    """Make the condition that a concept's score lies above or below a value on the last `for_tokens` rows."""
    return When(concept=concept, above=above, for_tokens=for_tokens, below=below)


def all_of(*conditions: Condition) -> AllOf:
    """Make the condition that all conditions hold on one row; also written with `&`."""
    return AllOf(of=conditions)


def any_of(*conditions: Condition) -> AnyOf:
    """Make the condition that at least one condition holds; also written with `|`."""
    return AnyOf(of=conditions)


def not_(condition: Condition) -> Not:
    """Make the condition that a condition does not hold; also written with `~`."""
    return Not(of=condition)


def flag(name: str) -> Flag:
    """Report a firing each time the condition begins to hold."""
    return Flag(name=name)


def stop(name: str) -> Stop:
    """End the text, with `finish_reason` `rule`."""
    return Stop(name=name)


def steer(
    steering: Steering | Add | Cap | Ablate, *, name: str = "steer", off_below: float | None = None, off_for: int = 1
) -> Steer:
    """Switch a Steering, or a single op, on. It is switched off when the condition has not held for `off_for` rows, or,
    with `off_below`, when all its concepts were below that value for `off_for` rows."""
    ops = steering if isinstance(steering, Steering) else Steering(ops=(steering,))
    return Steer(name=name, steering=ops, off_below=off_below, off_for=off_for)
