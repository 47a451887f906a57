"""Random requests that differ in everything; many begin alike, so that the prefix cache has something to get wrong."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from steerscope.specs import Ablate, Add, Cap, Capture, Sampling, Steering
from steerscope.specs.watch import Rule, Watch, flag, steer, stop, when
from support.model import HIDDEN, LENSES, PACK, VOCAB

SELECTORS = ("all", "prompt", "generated", "last_prompt", "positions=[0:3]", "!last_prompt")
How = Literal["cancel", "leave", "kill"]  # by name; by closing the stream; by ending the task that waits
_MISTAKES: tuple[dict[str, Any], ...] = (
    {"steer": Add(vector=np.ones(HIDDEN, np.float32), layers=99)},
    {"steer": Add(vector=np.ones(7, np.float32), layers=0)},
    {"steer": Add(vector="nobody knows it", layers=0)},
    {"capture": Capture(layers="0-40")},
    {"capture": Capture(layers=1, tokens="positions=[250]")},
    {"watch": Watch(pack="there is none")},
    {"watch": Watch(pack=PACK, rules=[when("no concept", above=0.5).then(flag("f"))])},
    {"prompt": [30] * 1100},
    {"prompt": [VOCAB + 5]},
)


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    sampling: Sampling
    steer: Steering = Steering()
    capture: Capture | None = None
    watch: Watch | None = None
    end: tuple[How, float] | None = None  # after this many tokens; a task, after this many seconds
    mistaken: bool = False  # must be refused before it runs
    streamed: bool = True
    keep: Literal["open", "closed", "unread"] = "open"  # what becomes of the handle of its rows
    kind: tuple[str, ...] = ()


def draw(rng: np.random.Generator, prefix: list[int], watched: bool = True) -> Request:
    own = rng.integers(20, VOCAB, int(rng.integers(1, 48))).tolist()
    prompt = (prefix[: int(rng.integers(16, len(prefix)))] if rng.random() < 0.5 else []) + own
    sampling = _sampling(rng)
    generates, several = sampling.max_tokens > 1, len(prompt) > 1
    ops = [_op(rng, generates, several) for _ in range(int(rng.choice([0, 0, 1, 2])))]
    capture = _capture(rng, generates) if rng.random() < 0.6 else None
    watch = _watch(rng, generates) if watched and rng.random() < 0.4 else None
    end = _end(rng) if rng.random() < 0.2 else None
    made: dict[str, Any] = {"prompt": prompt, "sampling": sampling, "steer": Steering(ops=tuple(ops))}
    made |= {"capture": capture, "watch": watch, "end": end}
    if mistaken := rng.random() < 0.04:
        made |= _MISTAKES[int(rng.integers(len(_MISTAKES)))] | {"end": None}
        made["steer"] = made["steer"] if isinstance(made["steer"], Steering) else Steering(ops=(made["steer"],))
    streamed = bool(end and end[0] != "kill") or bool(rng.random() < 0.6)
    keep = str(rng.choice(["open", "open", "closed", "unread"]))
    return Request(**made, mistaken=mistaken, streamed=streamed, keep=keep, kind=_kinds(made, mistaken))  # type: ignore[arg-type]


def _sampling(rng: np.random.Generator) -> Sampling:
    """What is drawn at random also tells its probability: without it, there is no way to check it."""
    stop = tuple(f"t{int(rng.integers(20, VOCAB))} t" if rng.random() < 0.3 else f" t{d}" for d in (4, 37))
    sampled = bool(rng.random() < 0.4)
    return Sampling(
        max_tokens=int(rng.integers(1, 32)), temperature=float(sampled), seed=int(rng.integers(1 << 30)),
        stop=stop if rng.random() < 0.3 else (), ignore_eos=bool(rng.random() < 0.3), n=1 + int(rng.random() < 0.06),
        logprobs=int(rng.integers(0, 3)) if sampled or rng.random() < 0.1 else None,
    )  # fmt: skip


def _tokens(rng: np.random.Generator, generates: bool, several: bool = True) -> str:
    """A selector that chooses something, whatever the text will be."""
    tokens = str(rng.choice(SELECTORS if several else SELECTORS[:4]))
    return "all" if tokens == "generated" and not generates else tokens


def _op(rng: np.random.Generator, generates: bool, several: bool) -> Add | Cap | Ablate:
    where: Any = {"layers": str(rng.choice(["all", "0", "1-2", "3"])), "tokens": _tokens(rng, generates, several)}
    where["vector"] = rng.standard_normal(HIDDEN).astype(np.float32)
    return [Add(scale=0.3, **where), Cap(min=-1, max=1, **where), Ablate(**where)][int(rng.integers(3))]


def _capture(rng: np.random.Generator, generates: bool) -> Capture:
    reduce: Any = [None, None, "mean", "last"][int(rng.integers(4))]
    layers, tokens = str(rng.choice(["all", "0", "1,3"])), _tokens(rng, generates, several=False)
    return Capture(layers=layers, tokens=tokens, reduce=reduce, before_steering=bool(rng.random() < 0.2))


def _watch(rng: np.random.Generator, generates: bool) -> Watch:
    rules = [_rule(rng, name, generates) for name in ("a", "b")[: int(rng.choice([0, 1, 1, 2]))]]
    tokens = str(rng.choice(["all", "all", "generated", "prompt"]))
    tokens = "all" if tokens == "generated" and not generates else tokens
    return Watch(pack=PACK, top_k=int(rng.integers(1, 5)), tokens=tokens, rules=rules)


def _rule(rng: np.random.Generator, name: str, generates: bool) -> Rule:
    def leaf(concept: int) -> Any:
        bounds: Any = {"above": float(rng.uniform(0.6, 0.95))} if rng.random() < 0.8 else {"below": 0.2}
        return when(f"c{concept}", for_tokens=int(rng.integers(1, 3)), **bounds)

    one, other = rng.choice(LENSES, 2, replace=False).tolist()  # of one alone a condition could contradict itself
    condition = [leaf(one), leaf(one) & leaf(other), leaf(one) & ~leaf(other)][int(rng.integers(3))]
    push = Add(vector=rng.standard_normal(HIDDEN).astype(np.float32), scale=0.4, layers="1-2")
    actions = [flag(name), stop(name), steer(push, name=name, off_for=int(rng.integers(1, 4)))]
    return condition.then(actions[int(rng.integers(3 if generates else 2))])


def _end(rng: np.random.Generator) -> tuple[How, float]:
    how: How = ("cancel", "leave", "kill")[int(rng.integers(3))]
    return how, float(rng.uniform(0, 0.3)) if how == "kill" else float(rng.integers(1, 12))


def _kinds(made: dict[str, Any], mistaken: bool) -> tuple[str, ...]:
    if mistaken:
        return ("mistaken",)
    capture, watch, end = made["capture"], made["watch"], made["end"]
    found = [type(op).__name__.lower() for op in made["steer"].ops]
    found += [f"captured, {capture.reduce}" if capture.reduce else "captured"] if capture else []
    found += ["watched", *{type(rule.then).__name__.lower() + " rule" for rule in watch.rules}] if watch else []
    found += [{"cancel": "cancelled", "leave": "left", "kill": "killed"}[end[0]]] if end else []
    found += ["stop strings"] if made["sampling"].stop else []
    return tuple(found or ["plain"])
