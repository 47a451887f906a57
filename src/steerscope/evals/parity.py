"""Compare two engines under steering, token by token.

`continued` writes greedy answers under each condition and keeps the log-probabilities of the likeliest tokens at every
step. `agreement` asks another engine for those of the same steps, each as a request whose prompt is everything before
it, so steerings must act on all tokens. It also measures how far leaving the steering out would move them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steerscope.engines.results import TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.extraction.runs import batches
from steerscope.specs import InvalidRequest, Message, Problem, Sampling, Steering

_TOP = 5
_AT_ONCE = 64
Conditions = Mapping[str, Steering | None]


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens before one step of a text, and the likeliest next ones."""

    before: tuple[int, ...]
    top: dict[int, float]


def continued(
    engine: SyncEngine, questions: Sequence[str], conditions: Conditions, tokens: int
) -> dict[str, list[Step]]:
    """Greedy answers under each condition, as steps."""
    partly = [name for name, one in conditions.items() if one and any(op.tokens != "all" for op in one.ops)]
    if partly:
        what = f"{', '.join(partly)} acts on some tokens only"
        raise InvalidRequest([Problem("steer", what, "steer all: here every step is a prompt of its own")])
    found = {}
    for name, steering in conditions.items():
        prompts = [engine.aio.render([Message(role="user", content=question)]) for question in questions]
        done = engine.generate(prompts, Sampling(max_tokens=tokens, logprobs=_TOP), steer=steering)
        found[name] = [
            Step((*one.prompt_token_ids, *one.token_ids[:i]), dict(logprobs.top))
            for one in done
            for i, logprobs in enumerate(one.choices[0].logprobs)
        ]
    return found


def agreement(
    engine: SyncEngine, texts: Mapping[str, Sequence[Step]], conditions: Conditions
) -> dict[str, dict[str, float | None]]:
    """Return, by condition, differences of log-probabilities, and how often the likeliest token is the same.

    An engine returns only its 20 likeliest tokens: `compared` is the number of tokens that both return, `unknown` that
    of the others. `moved` is the mean difference that leaving the steering out would make."""
    found = {}
    for name, steps in texts.items():
        mine = _likeliest(engine, steps, conditions[name])
        apart = _apart(steps, mine)
        without = _apart(steps, _likeliest(engine, steps, None)) if conditions[name] else apart * 0
        found[name] = {
            "steps": len(steps),
            "compared": len(apart),
            "unknown": sum(len(step.top) for step in steps) - len(apart),
            "mean": float(apart.mean()) if len(apart) else None,
            "most": float(apart.max()) if len(apart) else None,
            "same": float(np.mean([_best(one.top) == _best(other) for one, other in zip(steps, mine, strict=True)])),
            "moved": float(without.mean()) if len(without) else None,
        }
    return found


def _likeliest(engine: SyncEngine, steps: Sequence[Step], steering: Steering | None) -> list[dict[int, float]]:
    found = []
    for part in batches(steps, _AT_ONCE):
        prompts = [TokenPrompt(one.before) for one in part]
        done = engine.generate(prompts, Sampling(max_tokens=1, logprobs=20), steer=steering)
        found += [dict(one.choices[0].logprobs[0].top) for one in done]
    return found


def _apart(steps: Sequence[Step], others: Sequence[Mapping[int, float]]) -> np.ndarray:
    """Differences of the tokens that both return."""
    pairs = zip(steps, others, strict=True)
    return np.array(
        [abs(step.top[token] - other[token]) for step, other in pairs for token in step.top if token in other]
    )


def _best(top: Mapping[int, float]) -> int:
    return max(top, key=top.__getitem__)
