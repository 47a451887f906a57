"""From examples to a vector with its quality, a layer and a scale, on real engines."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from steerscope.engines.hf import HFEngine
from steerscope.engines.load import load
from steerscope.engines.sync import SyncEngine
from steerscope.extraction import DatasetEntry, Examples, LayerQuality, extract, load_contrast_set, row_norms
from steerscope.extraction.extract import recommended
from steerscope.extraction.reading import last, read_rows
from steerscope.extraction.strategies import STRATEGIES, strategy
from steerscope.specs.errors import InvalidRequest
from support import tiny

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

RESULTS = Path(__file__).parent.parent.parent / "bench" / "results"
WORDS = ["dog", "week", "work", "beach", "fox", "time", "range", "Fuchs"]
PAIRS = [
    DatasetEntry(f"The quick brown {word} had a wonderful time", f"And then the lazy {word} rained at work")
    for word in WORDS
]
EXAMPLES = Examples.of_pairs(PAIRS)


@pytest.fixture(scope="module")
def engine() -> Iterator[SyncEngine]:
    with HFEngine(tiny.model(), tiny.tokenizer(), name="tiny").sync as engine:
        yield engine


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_vector_is_what_the_strategy_makes_of_the_rows(engine: SyncEngine, name: str) -> None:
    found = extract(engine, EXAMPLES, strategy=name, tokens="last=2", name="weather")
    rows = read_rows(engine, EXAMPLES.texts, last(2))
    wanted = strategy(name)(rows, torch.tensor(EXAMPLES.positive), torch.tensor(EXAMPLES.pairs))
    vector = found.vector
    assert (vector.layers, vector.model, vector.method, vector.site) == ((0, 1, 2, 3), "tiny", name, "resid_post")
    torch.testing.assert_close(torch.stack(list(vector.directions.values())), wanted, atol=1e-5, rtol=1e-4)
    told = {"layer": found.layer, "scale": found.scale, "auroc": recommended(found.quality).auroc}
    origin = {"name": "weather", "data": "weather", "examples": 16, "tokens": "last=2"}
    assert vector.provenance == {**origin, "recommended": told}


def test_the_scale_adds_a_quarter_of_a_row_at_the_recommended_layer(engine: SyncEngine) -> None:
    found = extract(engine, EXAMPLES, layers="1-3", site="mlp_out")
    assert found.layer in (1, 2, 3)
    norm = row_norms(engine, EXAMPLES.texts, layers=found.layer, site="mlp_out")[found.layer]
    assert found.scale * float(found.vector[found.layer].norm()) == pytest.approx(norm / 4, rel=1e-4)
    done = engine.generate("a lazy dog", steer=found.vector.add(found.scale, layers=found.layer))
    assert done.steered[0].layers == (found.layer,)


def test_of_the_layers_near_the_best_the_one_with_the_largest_effect_is_recommended() -> None:
    measured = {3: (0.7, 9.0), 4: (0.93, 5.0), 5: (0.985, 3.0), 6: (0.99, 2.0), 7: (0.95, 4.0)}
    quality = [LayerQuality(layer, auroc, effect, 1.0, 0.5, 0.5) for layer, (auroc, effect) in measured.items()]
    assert recommended(quality).layer == 5


def test_held_out_examples_measure_and_do_not_make_the_vector(engine: SyncEngine) -> None:
    turned = Examples(EXAMPLES.texts, tuple(not label for label in EXAMPLES.positive))
    alone, measured = extract(engine, EXAMPLES), extract(engine, EXAMPLES, heldout=turned)
    for layer, direction in alone.vector.directions.items():
        torch.testing.assert_close(measured.vector.directions[layer], direction, atol=1e-5, rtol=1e-4)
    assert all(one.auroc < 0.1 for one in measured.quality)
    assert max(one.auroc for one in alone.quality) > 0.9


@pytest.mark.parametrize("labelled", [False, True])
def test_other_held_out_examples_never_change_the_layer_or_the_scale(engine: SyncEngine, labelled: bool) -> None:
    given = Examples(EXAMPLES.texts, EXAMPLES.positive) if labelled else EXAMPLES
    alone = extract(engine, given)
    words = Examples.of_pairs([DatasetEntry(f"{word} " * 9, f"A {word}, and") for word in WORDS[:5]])
    turned = Examples(EXAMPLES.texts, tuple(not label for label in EXAMPLES.positive))
    for heldout in (words, turned):
        found = extract(engine, given, heldout=heldout)
        assert (found.layer, found.scale) == (alone.layer, alone.scale)
        told = next(one.auroc for one in found.quality if one.layer == found.layer)
        assert found.vector.provenance["recommended"] == {"layer": found.layer, "scale": found.scale, "auroc": told}


def test_the_held_out_quality_does_not_choose_the_layer(engine: SyncEngine) -> None:
    found = [extract(engine, EXAMPLES, heldout=_random_labels(seed)) for seed in range(3)]
    assert len({one.layer for one in found}) == 1
    assert len({recommended(one.quality).layer for one in found}) > 1


def _random_labels(seed: int) -> Examples:
    order = torch.randperm(len(EXAMPLES), generator=torch.Generator().manual_seed(seed))
    return Examples(EXAMPLES.texts, tuple((order % 2 == 0).tolist()))


@pytest.mark.long
@pytest.mark.smollm
def test_a_shipped_set_gives_the_layer_and_scale_of_the_docs() -> None:
    data = load_contrast_set("happy_sad")
    with load("smollm2-135m", max_batch=32) as smollm:
        apart = Examples.of_pairs(data.heldout)
        found = extract(smollm, Examples.of_pairs(data.extraction), heldout=apart)
    told = json.loads((RESULTS / "vector_study.json").read_text())["sets"]["happy_sad"]
    assert found.layer == told["layer"]
    assert found.scale == pytest.approx(told["scale"], rel=1e-3)


@pytest.mark.parametrize("count", [4, 5, 6, 7])
def test_a_few_pairs_are_enough_for_every_measure(engine: SyncEngine, count: int) -> None:
    found = extract(engine, Examples.of_pairs(PAIRS[:count]))
    assert all(abs(one.effect) < 1000 for one in found.quality)
    assert any(one.effect for one in found.quality)


def test_one_token_examples_have_a_vector_and_a_scale(engine: SyncEngine) -> None:
    words = [DatasetEntry(a, b) for a, b in zip("aceg", "bdfh", strict=True)]
    assert len(tiny.tokenizer()("a")["input_ids"]) == 1
    found = extract(engine, Examples.of_pairs(words), tokens="last")
    assert found.scale > 0
    some = extract(engine, Examples.of_pairs([*words, *PAIRS]), tokens="last")
    longer = [text for text in Examples.of_pairs([*words, *PAIRS]).texts if len(str(text)) > 1]
    norm = row_norms(engine, longer, layers=some.layer)[some.layer]
    assert some.scale * float(some.vector[some.layer].norm()) == pytest.approx(norm / 4, rel=1e-4)


def test_every_bad_example_is_named_by_its_pair_and_side_or_its_number(engine: SyncEngine) -> None:
    short = [*PAIRS[:5], DatasetEntry(str(PAIRS[5].positive), "a")]
    apart = Examples(("a", *EXAMPLES.texts), (True, *EXAMPLES.positive))
    for tokens in ("last=3", "position=2"):  # refused before the engine is asked, and by the engine
        with pytest.raises(InvalidRequest) as caught:
            extract(engine, Examples.of_pairs(short), heldout=apart, tokens=tokens)
        own, other = (problem.field for problem in caught.value.problems)
        assert own.startswith("pairs[5].negative")
        assert other.startswith("heldout.examples[0]")


def test_chats_are_read_by_their_responses(engine: SyncEngine) -> None:
    def chat(answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": "How was it?"}, {"role": "assistant", "content": answer}]

    chats = Examples.of_pairs([DatasetEntry(chat(str(p.positive)), chat(str(p.negative))) for p in PAIRS])
    found = extract(engine, chats, tokens="response")
    assert max(one.auroc for one in found.quality) > 0.9
    assert found.vector.provenance["tokens"] == "response"


def test_tokens_that_do_not_differ_are_refused(engine: SyncEngine) -> None:
    same = Examples.of_pairs([DatasetEntry(f"The lazy dog {word}", f"The lazy dog, {word}") for word in WORDS])
    with pytest.raises(InvalidRequest, match="direction at layer 0 is zero; the chosen tokens must differ"):
        extract(engine, same, tokens="position=0")
