"""Answers: the instructions that the model gets, whose rows are averaged, and that seeds do not depend on the order."""

from pathlib import Path

import pytest
import torch

from engines.conftest import with_eos
from extraction.personas.conftest import role
from steerscope.engines.hf import HFEngine
from steerscope.engines.results import Generation
from steerscope.engines.sync import SyncEngine
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.personas.run import Shards, answer_all, rollouts, text_of
from steerscope.extraction.runs import Ledger, RolloutSettings, conversation, takes_system
from steerscope.specs.errors import RequestFailed
from support import tiny

SETTINGS = RolloutSettings(max_tokens=7, temperature=0.9, seed=11)
FOX = rollouts(role("fox", "A fox.", "A dog."), ["How was it?", "And then?"], "tiny")


def ask(engine: SyncEngine, folder: Path, wanted: list, batch: int = 32) -> tuple[Ledger, Shards, list]:
    """With the sizes of the batches, and then what failed."""
    shards, failures = Shards(folder / "shards"), list[str]()
    ledger = Ledger(folder / "fox.jsonl", shards.holds)
    _, *sizes = answer_all(engine, wanted, SETTINGS, ledger, shards, batch, failures)
    return ledger, shards, sizes + failures


def listen(engine: SyncEngine, monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """The generations that answers are made of: a text alone does not tell its tokens."""
    real, heard = engine.chat, []

    def chat(*args: object, **options: object) -> list[Generation]:
        heard.extend(real(*args, **options))  # type: ignore[call-overload]
        return heard[-len(args[0]) :]  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "chat", chat)
    return heard


def reference(done: Generation) -> torch.Tensor:
    """The mean row of the answer, from one plain forward of transformers over the same tokens."""
    model, kept = tiny.model(), []
    hook = model.base_model.layers[-1].register_forward_hook(lambda *args: kept.append(args[-1]))  # type: ignore[union-attr,index]
    fed = torch.tensor([[*done.prompt_token_ids, *done.token_ids[:-1]]])
    with torch.no_grad():
        states = model(fed, output_hidden_states=True).hidden_states
    hook.remove()
    last = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
    return torch.stack([state[0, len(done.prompt_token_ids) :].mean(0) for state in [*states[1:-1], last]])


def test_the_kept_mean_is_that_of_the_answers_own_rows(
    engine: SyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = listen(engine, monkeypatch)
    ledger, shards, _ = ask(engine, tmp_path, FOX)
    for done, record in zip(heard, ledger.records.values(), strict=True):
        assert record["tokens"] == len(done.token_ids) == 7
        torch.testing.assert_close(shards.read([record])[0], reference(done), atol=1e-4, rtol=1e-4)


def test_every_instruction_meets_every_question_and_lines_say_so(engine: SyncEngine, tmp_path: Path) -> None:
    ledger, shards, told = ask(engine, tmp_path, FOX, batch=3)
    assert told == [3, 1]
    lines = list(ledger.records.values())
    assert {(line["prompt_index"], line["question_index"]) for line in lines} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for one, line in zip(FOX, lines, strict=True):
        assert (line["system_prompt"], line["question"], line["label"]) == (one.system, one.question, "pos")
        assert [message["role"] for message in line["conversation"]] == ["system", "user", "assistant"]
        assert [message["content"] for message in line["conversation"][:2]] == [one.system, one.question]
    assert shards.read(lines).shape == (4, 4, 64)
    assert engine.stats()["capture_bytes"] == 0


def test_answers_do_not_depend_on_the_order_or_the_batch(engine: SyncEngine, tmp_path: Path) -> None:
    one, _, _ = ask(engine, tmp_path / "a", FOX)
    other, _, _ = ask(engine, tmp_path / "b", FOX[::-1], batch=1)
    texts = {id: text_of(record) for id, record in one.records.items()}
    assert texts == {id: text_of(record) for id, record in other.records.items()}
    assert len(set(texts.values())) > 1


def test_a_trait_is_told_both_and_the_default_is_told_nothing() -> None:
    trait = Persona.parse({"name": "calm", "instruction": [{"pos": "Be calm.", "neg": "Be wild."}]})
    assert [(one.key, one.system) for one in rollouts(trait, ["Who?"], "tiny")] == [
        ("pos_p0_q0", "Be calm."),
        ("neg_p0_q0", "Be wild."),
    ]
    nobody = Persona.parse({"name": "default", "instruction": [{"pos": ""}, {"pos": "You are {model_name}."}]})
    found = rollouts(nobody, ["Who?"], "tiny", default=True)
    assert [(one.key, one.system) for one in found] == [("default_p0_q0", ""), ("default_p1_q0", "You are tiny.")]
    assert [message.role for message in conversation(found[0].system, found[0].question, True)] == ["user"]


REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + tiny.CHATML
DROPS = tiny.CHATML.replace("{{ '<|im_start|>' + m", "{% if m['role'] != 'system' %}{{ '<|im_start|>' + m").replace(
    "'<|im_end|>\n' }}", "'<|im_end|>\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", [REFUSES, DROPS])
def test_a_template_without_a_place_for_the_system_gets_it_before_the_question(template: str, tmp_path: Path) -> None:
    with HFEngine(tiny.model(), tiny.tokenizer("bytes", template), name="tiny").sync as engine:
        assert not takes_system(engine)
        ledger, _, _ = ask(engine, tmp_path, FOX[:1])
        (record,) = ledger.records.values()
    assert record["conversation"][0] == {"role": "user", "content": "A fox.\n\nHow was it?"}


def test_one_that_fails_is_told_and_left_for_the_next_run(
    engine: SyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine.chat

    def failing(*args: object, **options: object) -> object:
        error = RequestFailed("it overflowed")
        done = list(real(*args, **options))  # type: ignore[call-overload]
        done[1].capture.close()
        error.completed = [done[0], None, *done[2:]]
        raise error

    monkeypatch.setattr(engine, "chat", failing)
    ledger, _, told = ask(engine, tmp_path, FOX)
    assert told == [4, "it overflowed"]
    assert list(ledger.records) == [one.id for i, one in enumerate(FOX) if i != 1]
    monkeypatch.undo()
    ledger, _, told = ask(engine, tmp_path, FOX)
    assert told == [1]
    assert set(ledger.records) == {one.id for one in FOX}


def test_an_answer_of_one_token_has_no_row_and_is_not_asked_for_again(
    engine: SyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = listen(engine, monkeypatch)
    ask(engine, tmp_path / "a", FOX[:2])
    with HFEngine(with_eos(tiny.model(), heard[0].token_ids[0]), tiny.tokenizer(), name="tiny").sync as short:
        ledger, shards, _ = ask(short, tmp_path / "b", FOX[:2])
        assert [record["tokens"] for record in ledger.records.values()][0] == 1
        empty, full = ledger.records.values()
        assert (empty["shard"], empty["row"]) == (None, None)
        assert torch.isfinite(shards.read([full])).all()
        assert ask(short, tmp_path / "b", FOX[:2])[2] == []
