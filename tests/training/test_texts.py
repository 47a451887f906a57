"""Texts to tokens: what counts, what is steered, and every bad line named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from steerscope.engines.hf import HFEngine
from steerscope.extraction.personas.definitions import load_questions
from steerscope.specs.errors import InvalidRequest
from steerscope.training.texts import Completion, TrainingSample, load_training_set, samples, shipped_training_sets
from support import tiny

CHAT = [
    {"role": "user", "content": "How was it?"},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "It rained."},
]


@pytest.fixture(scope="module")
def engine():
    made = HFEngine(tiny.model(), tiny.tokenizer(), name="tiny")
    ends_turn = frozenset([made.tokenizer.convert_tokens_to_ids("<|im_end|>")])
    made.context = replace(made.context, eos=ends_turn)
    yield made
    made.sync.close()


def words(engine: HFEngine, sample: TrainingSample, positions: list[int]) -> str:
    return engine.tokenizer.decode([sample.token_ids[at] for at in positions])


def steered(sample: TrainingSample) -> list[int]:
    return [at for a, b in sample.steered.within(0, len(sample.token_ids)) for at in range(a, b)]


def test_only_answers_count_with_the_tokens_that_end_them(engine: HFEngine) -> None:
    (sample,) = samples(engine, [CHAT])
    assert words(engine, sample, sample.targets) == "Fine.<|im_end|>It rained.<|im_end|>"
    assert sample.targets[-1] == len(sample.token_ids) - 1 == sample.width


def test_a_prompt_changes_what_stands_before_and_not_what_counts(engine: HFEngine) -> None:
    told = "Be sad."
    for source in (CHAT, "The fox jumps.", Completion(prompt="The fox", response=" jumps over")):
        (plain,), (prompted,) = samples(engine, [source]), samples(engine, [source], prompt=told)
        assert words(engine, plain, plain.targets) == words(engine, prompted, prompted.targets)
        assert told in engine.tokenizer.decode(prompted.token_ids)
        assert told not in engine.tokenizer.decode(plain.token_ids)


def test_a_template_without_system_messages_gets_the_prompt_in_the_first_message() -> None:
    template = tiny.CHATML.replace(
        "{% for", "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{% for", 1
    )
    made = HFEngine(tiny.model(), tiny.tokenizer(template=template), name="tiny")
    (sample,) = samples(made, [CHAT], prompt="Be sad.")
    assert "user\nBe sad.\n\nHow was it?" in made.tokenizer.decode(sample.token_ids)
    made.sync.close()


def test_of_a_plain_text_all_tokens_count_that_something_predicts(engine: HFEngine) -> None:
    (sample,) = samples(engine, ["The quick brown fox"])
    assert sample.targets == list(range(1, len(sample.token_ids)))


def test_selectors_mean_what_they_mean_in_a_request(engine: HFEngine) -> None:
    (sample,) = samples(engine, [CHAT], "generated")
    assert words(engine, sample, steered(sample)) == "It rained.<|im_end|>"
    (sample,) = samples(engine, [CHAT], "role=user")
    assert words(engine, sample, steered(sample)) == "How was it?And then?"
    (sample,) = samples(engine, [Completion(prompt="The fox", response=" jumps")], "prompt")
    assert words(engine, sample, steered(sample)) == "The fox"
    with pytest.raises(InvalidRequest, match="'positions=\\[0\\] & generated' selects no token of this text"):
        samples(engine, [CHAT], "positions=[0] & generated")


def test_all_texts_that_cannot_be_learned_from_are_named(engine: HFEngine) -> None:
    with pytest.raises(InvalidRequest) as refused:
        samples(engine, [CHAT[:1], "word " * 300, [{"role": "bard"}], CHAT], name="train")
    assert [problem.field.partition(".")[0] for problem in refused.value.problems][:2] == ["train[0]", "train[1]"]
    assert "has no token that counts" in str(refused.value)
    assert "the context of tiny holds 256" in str(refused.value)
    assert "train[2]" in str(refused.value)
    assert "train[3]" not in str(refused.value)


def test_every_form_of_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [{"messages": CHAT}, {"text": "Hello."}, {"prompt": "Hel", "response": "lo."}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = load_training_set(file)
    assert (found.name, len(found.train), found.validation, found.examples) == ("mine", 3, (), None)
    assert found.train[1:] == ("Hello.", Completion(prompt="Hel", response="lo."))
    pairs = [{"positive": f"I love {i}.", "negative": f"I hate {i}."} for i in range(4)]
    file.write_text("\n".join(map(json.dumps, pairs)))
    found = load_training_set(str(file))
    assert found.train == tuple(pair["positive"] for pair in pairs)
    assert found.examples is not None
    assert len(found.examples) == 8


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"text": "ok"}\nnot json\n{"text": 3}\n{"messages": [{"role": "user"}]}\n[]\n')
    with pytest.raises(InvalidRequest) as refused:
        load_training_set(file)
    fields = [problem.field for problem in refused.value.problems]
    assert [field[len(str(file)) + 1] for field in fields] == ["2", "3", "4", "5"]
    file.write_text("\n")
    with pytest.raises(InvalidRequest, match="holds no text"):
        load_training_set(file)
    with pytest.raises(InvalidRequest, match="sets are nostalgic"):
        load_training_set("nowhere")


@pytest.mark.parametrize("name", shipped_training_sets())
def test_parts_of_a_shipped_set_share_no_question_or_answer(name: str) -> None:
    found = load_training_set(name)
    parts = (found.train, found.validation, found.test)
    assert min(map(len, parts)) >= 12
    assert found.prompts
    for place in (0, 1):
        texts = [chat[place].content for part in parts for chat in part]  # type: ignore[index, union-attr]
        assert len(set(texts)) == len(texts)
    # What judges ask is not what was learned from.
    assert not set(load_questions()) & {chat[0].content for part in parts for chat in part}  # type: ignore[index, union-attr]


def test_words_in_a_text_do_not_make_it_a_pair_and_empty_lines_count(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"text": "positive"}\n\n{"text": "label"}\n')
    assert load_training_set(file).train == ("positive", "label")
    file.write_text('{"text": "ok"}\n\nnot json\n')
    with pytest.raises(InvalidRequest, match="mine.jsonl:3"):
        load_training_set(file)
