"""Answers of a model that plays a persona, each with the mean of its activations.

Every instruction of a persona meets every question. The answer and the mean of its rows come from the same pass: the
engine reduces the rows of generated tokens on the device while it writes (the last token has no row), so nothing is
read twice and an answer costs [layers, hidden] numbers however long it is. Seeds follow from what is asked, not from
the order, so that an interrupted run goes on with the answers it would have given.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field

from steerscope.engines.results import Generation
from steerscope.engines.sync import SyncEngine
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.personas.folder import Ledger, Record, Shards, digest
from steerscope.specs.base import Spec
from steerscope.specs.capture import Capture
from steerscope.specs.chat import Message
from steerscope.specs.errors import InvalidRequest, RequestFailed
from steerscope.specs.sampling import Sampling

Label = Literal["pos", "neg", "default"]
Progress = Callable[[str, int, int], None]  # what, how many are done, of how many


def silent(what: str, done: int, total: int) -> None:
    """Progress for nobody."""
    del what, done, total


_MEAN = Capture(layers="all", tokens="generated", reduce="mean")


class RolloutSettings(Spec):
    max_tokens: int = Field(default=64, ge=2)  # one token has no row
    temperature: float = Field(default=0.7, ge=0.0, le=2.0)
    top_p: float = Field(default=0.9, gt=0.0, le=1.0)
    seed: int = Field(default=0, ge=0)


@dataclass(frozen=True, slots=True)
class Rollout:
    persona: str
    label: Label
    prompt_index: int
    question_index: int
    system: str
    question: str

    @property
    def key(self) -> str:
        """As in the files of the public sets."""
        return f"{self.label}_p{self.prompt_index}_q{self.question_index}"

    @property
    def id(self) -> str:
        return digest(self.persona, self.label, self.prompt_index, self.system, self.question)


def rollouts(persona: Persona, questions: Sequence[str], model: str, *, default: bool = False) -> list[Rollout]:
    """All of a persona: pos, for a trait neg, too."""
    told: list[tuple[Label, int, str]] = []
    for i, instruction in enumerate(persona.instructions):
        told.append(("default" if default else "pos", i, instruction.pos.replace("{model_name}", model)))
        if instruction.neg is not None:
            told.append(("neg", i, instruction.neg))
    asked = enumerate(questions)
    return [
        Rollout(persona.name, label, i, j, system, q) for (j, q), (label, i, system) in itertools.product(asked, told)
    ]


def takes_system(engine: SyncEngine) -> bool:
    """Whether the chat template lets a system message through; some refuse it, some drop it."""
    question = Message(role="user", content="Hello")
    try:
        told = [engine.aio.render([Message(role="system", content=text), question]) for text in ("A.", "Be a fox.")]
    except InvalidRequest:
        return False
    return told[0].token_ids != told[1].token_ids


def answer_all(
    engine: SyncEngine,
    wanted: Sequence[Rollout],
    settings: RolloutSettings,
    ledger: Ledger,
    shards: Shards,
    batch: int,
) -> Iterator[tuple[int, str | None]]:
    """Answer what the ledger lacks; yields after each batch how many were asked, and why one failed, if any did.

    One that failed, or that the engine refuses (too long for the model), is left out of the ledger: the others go on,
    and the next run tries it again.
    """
    system = takes_system(engine)
    missing = [one for one in wanted if one.id not in ledger.records]
    for start in range(0, len(missing), batch):
        part = missing[start : start + batch]
        chats = [conversation(one.system, one.question, system) for one in part]
        samplings = [Sampling.parse({**settings.model_dump(), "seed": _seed(settings.seed, one)}) for one in part]
        done, reason = ask_each(
            lambda a, b, chats=chats, samplings=samplings: engine.chat(chats[a:b], samplings[a:b], capture=_MEAN),
            [one.question for one in part],
        )
        _commit(part, chats, done, ledger, shards)
        yield len(part), reason


def ask_each(
    ask: Callable[[int, int], list[Generation]], questions: Sequence[str]
) -> tuple[list[Generation | None], str | None]:
    """`ask` some of the questions, from a number to another. A refusal holds for the whole call, so the half that is to
    blame is looked for; what failed is None, with the reasons told."""

    def part(start: int, stop: int) -> tuple[list[Generation | None], str | None]:
        try:
            return list(ask(start, stop)), None
        except RequestFailed as error:
            return list(error.completed) or [None] * (stop - start), str(error)
        except InvalidRequest as error:
            if stop - start == 1:
                return [None], f"{questions[start][:60]!r}: {error}"
        half = (start + stop) // 2
        first, why = part(start, half)
        second, why_too = part(half, stop)
        return first + second, "\n".join(filter(None, (why, why_too))) or None

    return part(0, len(questions))


def conversation(told: str, question: str, system: bool) -> list[Message]:
    """`told` goes into a system message, or before the question where the template takes none."""
    if told and system:
        return [Message(role="system", content=told), Message(role="user", content=question)]
    return [Message(role="user", content=f"{told}\n\n{question}" if told else question)]


def _commit(
    part: Sequence[Rollout],
    chats: Sequence[list[Message]],
    done: Sequence[Generation | None],
    ledger: Ledger,
    shards: Shards,
) -> None:
    each = zip(part, chats, done, strict=True)
    answered = [(one, chat, found) for one, chat, found in each if found and found.finish_reason != "cancelled"]
    means, where = [], dict[str, int]()
    for one, _, found in answered:
        rows = found.rows
        if rows.n:  # a text of one token has none
            where[one.id] = len(means)
            means.append(torch.stack([rows[layer] for layer in rows.layers]))
        if found.capture:
            found.capture.close()
    shard = shards.write(part[0].persona, torch.stack(means)) if means else None
    ledger.append([_line(one, chat, found, shard, where.get(one.id)) for one, chat, found in answered])


def _line(one: Rollout, chat: list[Message], found: Generation, shard: str | None, row: int | None) -> Record:
    messages = [*chat, Message(role="assistant", content=found.text)]
    return {
        "id": one.id,
        "label": one.label,
        "prompt_index": one.prompt_index,
        "question_index": one.question_index,
        "system_prompt": one.system,
        "question": one.question,
        "conversation": [message.model_dump() for message in messages],
        "tokens": len(found.token_ids),
        "finish_reason": found.finish_reason,
        "shard": None if row is None else shard,
        "row": row,
    }


def text_of(record: Record) -> str:
    return record["conversation"][-1]["content"]


def _seed(seed: int, one: Rollout) -> int:
    return int(digest(seed, one.id)[:12], 16)
