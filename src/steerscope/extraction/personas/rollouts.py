"""Answers of a model that plays a persona, each with the mean of its activations.

Every instruction of a persona is combined with every question. The engine reduces the rows of the generated tokens on
the device, in the pass that writes them, so an answer costs [layers, hidden] numbers whatever its length (the last
token has no row). Seeds depend on what is asked and not on the order: a resumed run gives the same answers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from steerscope.engines.results import Generation
from steerscope.engines.sync import SyncEngine
from steerscope.extraction.answers import conversation, generate_each, takes_system
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.personas.folder import Shards
from steerscope.extraction.runs import Ledger, Record, RolloutSettings, digest, store_missing
from steerscope.specs import Capture, Message, Sampling

Label = Literal["pos", "neg", "default"]
_MEAN = Capture(layers="all", tokens="generated", reduce="mean")


@dataclass(frozen=True, slots=True)
class PersonaRollout:
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


def rollouts(persona: Persona, questions: Sequence[str], model: str, *, default: bool = False) -> list[PersonaRollout]:
    """All rollouts of a persona: pos, and for a trait also neg."""
    prompts: list[tuple[Label, int, str]] = []
    for i, instruction in enumerate(persona.instructions):
        prompts.append(("default" if default else "pos", i, instruction.pos.replace("{model_name}", model)))
        if instruction.neg is not None:
            prompts.append(("neg", i, instruction.neg))
    return [
        PersonaRollout(persona.name, label, i, j, system, question)
        for j, question in enumerate(questions)
        for label, i, system in prompts
    ]


def answer_all(
    engine: SyncEngine,
    wanted: Sequence[PersonaRollout],
    settings: RolloutSettings,
    ledger: Ledger,
    shards: Shards,
    batch: int,
    failures: list[str],
) -> Iterator[int]:
    """Answer what the ledger lacks; yields how many were there, then the size of each batch.

    An answer that fails, or that the engine refuses (too long for the model), is left out of the ledger, and its reason
    is added to `failures`; the next run tries it again.
    """
    with_system = takes_system(engine)

    def work(part: Sequence[PersonaRollout]) -> Iterator[Sequence[Record]]:
        chats = [conversation(one.system, one.question, with_system) for one in part]
        seeds = [int(digest(settings.seed, one.id)[:12], 16) for one in part]
        samplings = [Sampling.parse({**settings.model_dump(), "seed": seed}) for seed in seeds]
        done, reason = generate_each(
            lambda start, stop: engine.chat(chats[start:stop], samplings[start:stop], capture=_MEAN),
            [one.question for one in part],
        )
        failures.extend([reason] if reason else [])
        yield _records(part, chats, done, shards)

    return store_missing({one.id: one for one in wanted}, ledger, batch, work)


def _records(
    part: Sequence[PersonaRollout],
    chats: Sequence[list[Message]],
    done: Sequence[Generation | None],
    shards: Shards,
) -> Sequence[Record]:
    """Write the means of a batch as a shard; return the lines of its answers."""
    means: list[torch.Tensor] = []
    records: list[dict[str, object]] = []
    for one, chat, found in zip(part, chats, done, strict=True):
        if found is None:
            continue
        records.append({**_record(one, chat, found), "shard": None, "row": None})
        rows = found.rows
        if rows.n:  # an answer of one token has none
            records[-1]["row"] = len(means)
            means.append(torch.stack([rows[layer] for layer in rows.layers]))
        if found.capture:
            found.capture.close()
    if means:
        shard = shards.write(part[0].persona, torch.stack(means))
        for record in records:
            record["shard"] = None if record["row"] is None else shard
    return records


def _record(one: PersonaRollout, chat: list[Message], found: Generation) -> dict[str, object]:
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
    }


def text_of(record: Record) -> str:
    return record["conversation"][-1]["content"]
