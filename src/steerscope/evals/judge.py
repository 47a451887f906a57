"""A model behind an OpenAI-compatible endpoint as a scorer: any provider's, or `steerscope serve`.

A rubric is a text with `{question}` and `{answer}` in it; a judgement is a number from 0 to 100, or from 0 to 3. What
was judged is kept under a hash of judge, rubric, question and answer: equal answers are asked about once, and a run
that broke off goes on. Refusals and replies without a number are kept with their text, and counted; what never got a
reply is counted and asked again by the next run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from steerscope.evals.scorers import Interrupted, Json, Keep, Scored
from steerscope.extraction.endpoint import AskingFailed, Endpoint, NoReply
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.personas.folder import Record, digest
from steerscope.extraction.personas.judges import (
    Judged,
    parse_score,
    prompt_for,
    refuses,
    says_refusal,
    without_thinking,
)
from steerscope.files import reading
from steerscope.specs.errors import InvalidRequest, Problem


class JudgeScorer:
    """`judge`: what the endpoint says of each answer."""

    name = "judge"

    def __init__(
        self,
        endpoint: Endpoint,
        persona: Persona,
        highest: Literal[3, 100] | None = None,
        prices: tuple[float, float] | None = None,
    ) -> None:
        """`highest`: by default what our own rubric of the persona asks for, 3 of a role, and else 100. `prices`: of a
        million prompt and completion tokens."""
        if persona.eval_prompt is not None and "{answer}" not in persona.eval_prompt:
            what, remedy = "does not show the answer", "write {answer} where the answer is to stand"
            raise InvalidRequest([Problem("rubric", what, remedy)])
        own = 3 if persona.kind == "roles" and persona.eval_prompt is None else 100
        self.endpoint, self._persona, self._highest, self._prices = endpoint, persona, highest or own, prices

    @property
    def identity(self) -> str:
        shown = prompt_for(self._persona, Judged("{question}", "{answer}"))
        return digest(self.endpoint.name, shown, self._highest, *self.endpoint.changed)

    def about(self) -> dict[str, Json]:
        tally = self.endpoint.tally
        spent: dict[str, Json] = {f"requests: {outcome}": count for outcome, count in sorted(tally.outcomes.items())}
        spent |= {"prompt tokens": tally.prompt_tokens, "completion tokens": tally.completion_tokens}
        if self._prices:
            cost = tally.prompt_tokens * self._prices[0] + tally.completion_tokens * self._prices[1]
            spent["cost"] = round(cost / 1e6, 6)
        told: dict[str, Json] = {"judge": self.endpoint.name, "scale": self._highest, "spent": spent}
        if tally.refusal:
            told["last refusal"] = tally.refusal
        return told

    def __call__(self, answers: Sequence[Record]) -> list[Scored | None]:
        return self.one_by_one(answers, lambda *_: None)

    def one_by_one(self, answers: Sequence[Record], keep: Keep) -> list[Scored | None]:
        prompts = {
            one["id"]: prompt_for(self._persona, Judged(one["question"], one["text"]))
            for one in answers
            if "logprobs" not in one
        }
        different = list(dict.fromkeys(prompts.values()))
        failure = None

        def heard(prompt: str, reply: str | NoReply) -> None:
            score = self._scored(reply)
            for one in answers:
                if score is not None and prompts.get(one["id"]) == prompt:
                    keep(one, score)

        try:
            replies: Sequence[str | NoReply] = self.endpoint.ask(different, heard)
        except AskingFailed as error:
            replies, failure = error.replies, error
        said = dict(zip(different, replies, strict=True))
        ids = [one["id"] for one in answers]
        scores = [self._scored(said[prompts[id]]) if id in prompts else Scored({}) for id in ids]
        if failure is not None:
            raise Interrupted(str(failure), scores) from failure
        return scores

    def _scored(self, reply: str | NoReply) -> Scored | None:
        if isinstance(reply, NoReply):
            return None
        score, said = parse_score(reply, self._highest), without_thinking(reply)
        if said is None:
            return Scored({}, f"thinking cut off in {reply[:80]!r}")
        if says_refusal(said) or (score is None and refuses(said)):
            return Scored({}, f"refusal in {reply[:80]!r}")
        return Scored({}, f"no score in {reply[:80]!r}") if score is None else Scored({"judge": float(score)})


def rubric(path: Path | None, persona: Persona | None, name: str = "good") -> Persona:
    """What is judged by: a file, the persona's own words, or ours for a persona of that name."""
    if path is not None:
        with reading(path, "rubric"):
            text = path.read_text(encoding="utf-8")
        base = persona or Persona.parse({"name": name, "instruction": [{"pos": name, "neg": name}]})
        return base.model_copy(update={"eval_prompt": text})
    if persona is None:
        raise InvalidRequest([Problem("rubric", "there is none", "give --rubric FILE, or a run with --trait")])
    return persona
