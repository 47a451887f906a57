"""Which tokens stand for an example, against rows of plain transformers; and that means are taken on the device."""

from collections.abc import Iterator

import pytest
import torch

from steerscope.engines.hf import HFEngine
from steerscope.engines.sync import SyncEngine
from steerscope.extraction.reading import parse_choice, read_rows
from steerscope.specs.errors import InvalidRequest
from support import tiny

TEXT = "How was your week at work? I had a wonderful time at the beach"
CHAT = [{"role": "user", "content": "How was your week?"}, {"role": "assistant", "content": "I had a wonderful time"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[SyncEngine]:
    with HFEngine(tiny.model(), tiny.tokenizer(), name="tiny").sync as engine:
        yield engine


def all_rows(ids: list[int]) -> torch.Tensor:
    """[layers but the last, tokens, hidden] from plain transformers."""
    with torch.no_grad():
        states = tiny.model()(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack([state[0] for state in states[1:-1]])


def of_text(text: str) -> torch.Tensor:
    return all_rows(tiny.tokenizer()(text)["input_ids"])


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ("last", slice(-1, None)),
        ("last=3", slice(-3, None)),
        ("all", slice(1, None)),
        ("position=2", slice(2, 3)),
        ("position=-2", slice(-2, -1)),
    ],
)
def test_the_chosen_tokens_are_read(engine: SyncEngine, choice: str, chosen: slice) -> None:
    found = read_rows(engine, [TEXT], parse_choice(choice))
    assert found.shape == (1, 4, 64)
    torch.testing.assert_close(found[0, :3], of_text(TEXT)[:, chosen].mean(1), atol=1e-5, rtol=1e-5)


def test_a_marker_is_its_last_occurrence_with_every_token_of_it(engine: SyncEngine) -> None:
    text = "the lazy dog, and then the lazy dog at work"
    tokenizer = tiny.tokenizer()
    encoded = tokenizer(text, return_offsets_mapping=True)
    start = text.rindex("lazy dog")
    inside = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < start + 8 and b > start]
    assert len(inside) > 1
    found = read_rows(engine, [text], parse_choice("marker=lazy dog"))
    torch.testing.assert_close(found[0, :3], of_text(text)[:, inside].mean(1), atol=1e-5, rtol=1e-5)


def test_a_response_is_the_text_of_the_last_message_and_nothing_of_the_template(engine: SyncEngine) -> None:
    text = tiny.tokenizer().apply_chat_template(CHAT, tokenize=False)
    assert isinstance(text, str)
    encoded = tiny.tokenizer()(text, add_special_tokens=False, return_offsets_mapping=True)
    start = text.index("I had a wonderful time")
    inside = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < start + 22 and b > start]
    wanted = all_rows(encoded["input_ids"])[:, inside]
    found = read_rows(engine, [CHAT], parse_choice("response"))
    torch.testing.assert_close(found[0, :3], wanted.mean(1), atol=1e-5, rtol=1e-5)
    end = read_rows(engine, [CHAT], parse_choice("last"))
    torch.testing.assert_close(end[0, :3], wanted[:, -1], atol=1e-5, rtol=1e-5)


def test_a_chat_that_ends_with_the_user_is_read_to_where_the_answer_would_begin(engine: SyncEngine) -> None:
    ids = tiny.tokenizer().apply_chat_template(CHAT[:1], add_generation_prompt=True, tokenize=False)
    assert isinstance(ids, str)
    wanted = all_rows(tiny.tokenizer()(ids, add_special_tokens=False)["input_ids"])[:, -1]
    found = read_rows(engine, [CHAT[:1]], parse_choice("last"))
    torch.testing.assert_close(found[0, :3], wanted, atol=1e-5, rtol=1e-5)


def test_texts_and_chats_of_any_length_share_one_pass_and_leave_one_row_each(engine: SyncEngine) -> None:
    texts = [TEXT, CHAT, "a lazy dog", TEXT * 4]
    together = read_rows(engine, texts, parse_choice("last=2"))
    alone = torch.cat([read_rows(engine, [text], parse_choice("last=2")) for text in texts])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert engine.stats()["capture_bytes"] == 0


def test_many_texts_are_read_in_parts(engine: SyncEngine) -> None:
    texts = [f"{i} lazy dogs" for i in range(300)]
    found = read_rows(engine, texts, parse_choice("last"), layers=[1])
    assert found.shape == (300, 1, 64)
    for i in (0, 255, 256, 299):
        torch.testing.assert_close(found[i, 0], of_text(texts[i])[1, -1], atol=1e-5, rtol=1e-5)


def test_another_site_can_be_read(engine: SyncEngine) -> None:
    before, after, mlp = (
        read_rows(engine, [TEXT], parse_choice("last=3"), layers=2, site=site)
        for site in ("resid_mid", "resid_post", "mlp_out")
    )
    torch.testing.assert_close(before + mlp, after, atol=1e-4, rtol=1e-4)


def test_every_example_that_does_not_fit_is_named(engine: SyncEngine) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_rows(engine, [TEXT, CHAT, CHAT[:1]], parse_choice("response"))
    assert [str(problem).partition(";")[0] for problem in caught.value.problems] == [
        "texts[0]: is no chat whose messages can be told apart",
        "texts[2]: has no response",
    ]
    with pytest.raises(InvalidRequest, match=r"texts\[1\]: does not hold 'beach'; add it, or choose another marker"):
        read_rows(engine, [TEXT, "a lazy dog"], parse_choice("marker=beach"))


def test_an_example_that_the_engine_refuses_is_named_by_its_own_number(engine: SyncEngine) -> None:
    texts = [f"{i} lazy dogs" for i in range(299)] + ["a"]
    with pytest.raises(InvalidRequest, match=r"^texts\[299\]\.[^ ]*: position 2 is never computed"):
        read_rows(engine, texts, parse_choice("position=2"), layers=[1])


@pytest.mark.parametrize(
    "text", ["first", "last=", "last=x", "last=0", "position", "position=x", "marker=", "all=1", ""]
)
def test_a_choice_that_cannot_be_read_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tokens: .*; (write|choose) "):
        parse_choice(text)
