"""What `mean_difference` promises: the textbook mean difference, and wrong inputs refused by name."""

from collections.abc import Iterator

import pytest
import torch

from steerscope.engines.hf import HFEngine
from steerscope.engines.sync import SyncEngine
from steerscope.extraction import (
    ContrastPair,
    DatasetEntry,
    Examples,
    extract,
    load_contrast_set,
    mean_difference,
    row_norms,
    sentence_rows,
    sentences,
)
from steerscope.extraction.data import shipped_sets
from steerscope.specs.errors import InvalidRequest
from support import tiny

PAIRS = [
    ContrastPair("I had a wonderful time at the beach.", "And then it rained all week at work."),
    ContrastPair("The quick brown fox jumps over the lazy dog!", "How was the lazy dog?"),
    ContrastPair("What a wonderful week I had", "What a time I had at work, and then it rained"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[SyncEngine]:
    with HFEngine(tiny.model(), tiny.tokenizer(), name="tiny").sync as engine:
        yield engine


def reference_rows(text: str) -> torch.Tensor:
    """[layers, tokens, hidden] from plain transformers; `hidden_states` ends behind the final norm, so the last layer
    comes from a hook."""
    model, kept = tiny.model(), []
    hook = model.base_model.layers[-1].register_forward_hook(lambda *args: kept.append(args[-1]))  # type: ignore[union-attr,index]
    try:
        with torch.no_grad():
            states = model(**tiny.tokenizer()(text, return_tensors="pt"), output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    last = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
    return torch.stack([state[0] for state in [*states[1:-1], last]]).double()


@pytest.mark.parametrize("last_tokens", [1, 3, 5])
def test_the_vector_equals_a_hand_computation_with_plain_transformers(engine: SyncEngine, last_tokens: int) -> None:
    vector = mean_difference(engine, PAIRS, last_tokens=last_tokens)

    def mean(texts: list[str]) -> torch.Tensor:
        return torch.stack([reference_rows(text)[:, -last_tokens:].mean(1) for text in texts]).mean(0)

    expected = mean([pair.positive for pair in PAIRS]) - mean([pair.negative for pair in PAIRS])
    assert vector.layers == (0, 1, 2, 3)
    for layer in range(4):
        assert vector[layer].dtype == torch.float32
        torch.testing.assert_close(vector[layer].double(), expected[layer], atol=1e-5, rtol=1e-5)


def test_layers_can_be_chosen_and_keep_their_values(engine: SyncEngine) -> None:
    some, every = mean_difference(engine, PAIRS, layers="1-2"), mean_difference(engine, PAIRS)
    assert some.layers == (1, 2)
    for layer in (1, 2):
        torch.testing.assert_close(some[layer], every[layer], atol=1e-5, rtol=1e-5)  # batches may differ in shape


def test_the_vector_says_where_it_comes_from(engine: SyncEngine) -> None:
    vector = mean_difference(engine, PAIRS, last_tokens=2, data_name="weather")
    assert (vector.model, vector.site, vector.method) == ("tiny", "resid_post", "mean_difference")
    assert vector.provenance == {
        "name": "weather",
        "data": "weather",
        "pairs": 3,
        "tokens": "mean of the last 2",
        "template": "none (plain text)",
    }


def test_swapping_the_two_sides_flips_the_vector(engine: SyncEngine) -> None:
    swapped = [ContrastPair(pair.negative, pair.positive) for pair in PAIRS]
    there, back = mean_difference(engine, PAIRS), mean_difference(engine, swapped)
    assert all(cosine == pytest.approx(-1, abs=1e-6) for cosine in there.cosine(back).values())


def test_row_norms_are_the_mean_lengths_without_the_first_token(engine: SyncEngine) -> None:
    texts = sentences(PAIRS)
    rows = torch.cat([reference_rows(text)[:, 1:] for text in texts], dim=1)
    expected = rows.norm(dim=-1).mean(1)
    found = row_norms(engine, texts)
    assert list(found) == [0, 1, 2, 3]
    assert list(found.values()) == pytest.approx(expected.tolist(), rel=1e-5)
    assert row_norms(engine, texts, layers=2)[2] == pytest.approx(found[2], rel=1e-5)


def test_no_captured_row_is_left_behind(engine: SyncEngine) -> None:
    mean_difference(engine, PAIRS)
    row_norms(engine, sentences(PAIRS))
    assert engine.stats()["capture_bytes"] == 0


def test_no_pairs_are_refused(engine: SyncEngine) -> None:
    with pytest.raises(InvalidRequest, match="pairs: there are none; give at least one ContrastPair"):
        mean_difference(engine, [])


def test_a_sentence_shorter_than_the_tokens_asked_for_is_refused_by_name(engine: SyncEngine) -> None:
    with pytest.raises(InvalidRequest, match=r"texts\[1\]: has 1 tokens, 3 are needed; ask for fewer last tokens"):
        sentence_rows(engine, ["How was your week at work?", "a"])


def test_a_token_count_below_one_is_refused(engine: SyncEngine) -> None:
    with pytest.raises(InvalidRequest, match="the last 0 are asked for; choose 1 or more"):
        mean_difference(engine, PAIRS, last_tokens=0)


def test_a_layer_that_the_model_does_not_have_is_refused(engine: SyncEngine) -> None:
    with pytest.raises(InvalidRequest, match="layer 4 is out of range; tiny has layers 0–3"):
        mean_difference(engine, PAIRS, layers="3-4")


@pytest.mark.parametrize("texts", [[], "a bare string"])
def test_texts_that_are_no_list_are_refused(engine: SyncEngine, texts: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="no list of texts was given"):
        row_norms(engine, texts)


def test_norms_leave_out_texts_of_one_token_unless_there_are_no_others(engine: SyncEngine) -> None:
    assert row_norms(engine, ["How was your week?", "a"]) == row_norms(engine, ["How was your week?"])
    wanted = torch.stack([reference_rows(text)[:, 0] for text in "ab"]).norm(dim=-1).mean(0)
    assert list(row_norms(engine, ["a", "b"]).values()) == pytest.approx(wanted.tolist(), rel=1e-5)


def test_it_is_the_same_arithmetic_as_that_of_the_strategy(engine: SyncEngine) -> None:
    entries = [DatasetEntry(pair.positive, pair.negative) for pair in [*PAIRS, PAIRS[0]]]
    found = mean_difference(engine, [*PAIRS, PAIRS[0]])
    other = extract(engine, Examples.of_pairs(entries)).vector
    assert all(torch.equal(found[layer], other[layer]) for layer in range(4))


@pytest.mark.parametrize(
    ("positive", "negative", "message"),
    [
        ("", "It rained.", "positive: the sentence is empty"),
        ("It rained.", "  ", "negative: the sentence is empty"),
        ("It rained.", "It rained.", "both sentences are 'It rained.'"),
    ],
)
def test_a_pair_without_contrast_is_refused(positive: str, negative: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ContrastPair(positive, negative)


@pytest.mark.parametrize("name", shipped_sets())
def test_a_shipped_set_is_complete_and_its_held_out_part_is_apart(name: str) -> None:
    data = load_contrast_set(name)
    extraction, heldout = sentences(data.extraction), sentences(data.heldout)
    assert data.name == f"{data.positive}_{data.negative}" == name
    assert len(data.extraction) >= 12
    assert len(data.heldout) >= 8
    assert len({*extraction, *heldout}) == len(extraction) + len(heldout)
    assert all(text.endswith(".") and text == text.strip() for text in [*extraction, *heldout])


def test_an_unknown_set_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        InvalidRequest, match="there is no contrast set 'angry'; choose from calm_angry, happy_sad, hot_cold"
    ):
        load_contrast_set("angry")
