"""A model behind an OpenAI-compatible endpoint as a scorer: any provider's, or `steerscope serve`.

A rubric is a text with `{question}` and `{answer}` in it; a judgement is a number from 0 to 100, or from 0 to 3. Equal
answers are judged once. Refusals and replies without a number are stored with their text, and counted; a prompt
without a reply is counted and asked again by the next run.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from steerscope.evals.scorers import NOT_SCORED, Json, Scored
from steerscope.extraction.endpoint import Endpoint, NoReply
from steerscope.extraction.personas import judges
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.runs import Record, digest
from steerscope.files import reading
from steerscope.specs.errors import InvalidRequest, Problem


class JudgeScorer:
    """`judge`: the endpoint's judgement of each answer."""

    name = "judge"

    def __init__(
        self,
        endpoint: Endpoint,
        persona: Persona,
        highest: Literal[3, 100] | None = None,
        prices: tuple[float, float] | None = None,
    ) -> None:
        """`highest`: by default 3 for our own rubric of a role, else 100. `prices`: of a million prompt and completion
        tokens."""
        if problems := judges.check_rubric(persona, "rubric"):
            raise InvalidRequest(problems)
        default = 3 if persona.kind == "roles" and persona.eval_prompt is None else 100
        self.endpoint, self._persona, self._prices = endpoint, persona, prices
        self._highest = highest or default

    @property
    def identity(self) -> str:
        shown = judges.prompt_for(self._persona, judges.Judged("{question}", "{answer}"))
        return digest(self.endpoint.name, shown, self._highest, *self.endpoint.changed)

    def about(self) -> dict[str, Json]:
        usage = self.endpoint.usage
        spent: dict[str, Json] = {f"requests: {outcome}": count for outcome, count in sorted(usage.outcomes.items())}
        spent |= {"prompt tokens": usage.prompt_tokens, "completion tokens": usage.completion_tokens}
        if self._prices:
            cost = usage.prompt_tokens * self._prices[0] + usage.completion_tokens * self._prices[1]
            spent["cost"] = round(cost / 1e6, 6)
        facts: dict[str, Json] = {"judge": self.endpoint.name, "scale": self._highest, "spent": spent}
        if usage.refusal:
            facts["last refusal"] = usage.refusal
        return facts

    def __call__(self, answers: Sequence[Record]) -> Iterator[tuple[int, Scored | None]]:
        same: dict[str, list[int]] = {}
        for i, one in enumerate(answers):
            if "logprobs" in one:
                yield i, NOT_SCORED
            else:
                prompt = judges.prompt_for(self._persona, judges.Judged(one["question"], one["text"]))
                same.setdefault(prompt, []).append(i)
        prompts = list(same)
        for number, reply in self.endpoint.ask(prompts):
            score = self._scored(reply)
            for i in same[prompts[number]]:
                yield i, score

    def _scored(self, reply: str | NoReply) -> Scored | None:
        if isinstance(reply, NoReply):
            return None
        score, text = judges.parse_score(reply, self._highest), judges.without_thinking(reply)
        if text is None:
            return Scored({}, f"thinking cut off in {reply[:80]!r}")
        if judges.says_refusal(text) or (score is None and judges.refuses(text)):
            return Scored({}, f"refusal in {reply[:80]!r}")
        return Scored({}, f"no score in {reply[:80]!r}") if score is None else Scored({"judge": float(score)})


def rubric(path: Path | None, persona: Persona | None) -> Persona:
    """Return the persona to judge by: with a file as its rubric, or as it is."""
    if path is not None:
        with reading(path, "rubric"):
            text = path.read_text(encoding="utf-8")
        base = persona or Persona.parse({"name": "good", "instruction": [{"pos": "good", "neg": "good"}]})
        return base.model_copy(update={"eval_prompt": text})
    if persona is None:
        raise InvalidRequest([Problem("rubric", "there is none", "give --rubric FILE, or a run with --trait")])
    return persona
