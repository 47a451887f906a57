"""Expansion against a slow version of itself, row by row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lenses.packs import make, rows
from lenses.slow import slow_expand
from steerscope.lenses import Concept
from steerscope.lenses.bank import Bank
from steerscope.lenses.expand import BankExpander, Expansion
from steerscope.specs.errors import InvalidRequest


def assert_as_slow(found: Expansion, scores: torch.Tensor, base_levels: int, top_k: int, depth: int) -> None:
    """Every decision is right for the scores that were found, and those are the true ones.

    (Decisions are not taken from the true scores themselves: two lenses may be equal to the last bit but one, and
    products of other shapes round otherwise.)
    """
    assert found.scores is not None
    for n in range(len(scores)):
        known = torch.where(found.scores[n] > -torch.inf, found.scores[n], scores[n])
        seen, reported = slow_expand(found.pack, known, base_levels, top_k, depth)
        looked_at = (found.scores[n] > -torch.inf).nonzero().flatten().tolist()
        assert set(looked_at) == set(seen)
        torch.testing.assert_close(found.scores[n, looked_at], scores[n, looked_at], atol=1e-5, rtol=0)
        assert [i for i in found.indices[n].tolist() if i >= 0] == reported
        assert torch.equal(found.values[n, : len(reported)], found.scores[n, reported])
        assert found.values[n, len(reported) :].eq(0).all()
        assert [concept for concept, _ in found.row(n)] == [found.pack.concepts[i] for i in reported]


@settings(max_examples=25, deadline=None)
@given(
    base_levels=st.integers(1, 3),
    top_k=st.integers(1, 12),
    depth=st.integers(0, 4),
    calibrated=st.booleans(),
    seed=st.integers(0, 50),
)
def test_the_same_concepts_are_looked_at_and_reported(base_levels, top_k, depth, calibrated, seed):
    pack = make([3, 8, 20, 30], seed=seed, calibrated=calibrated)
    bank, x = Bank(pack), rows(5, seed=seed)
    found = BankExpander(bank, base_levels).expand(x, top_k, depth, keep_scores=True)
    assert_as_slow(found, bank.scores(x), base_levels, top_k, depth)


def test_many_rows_are_expanded_as_each_alone():
    pack = make([3, 8, 20], calibrated=True)
    whole, x = BankExpander(Bank(pack), 1), rows(600)
    together = whole.expand(x, 4, 3)
    assert together.scores is None
    for n in (0, 255, 256, 599):
        single = whole.expand(x[n : n + 1], 4, 3)
        assert torch.equal(together.indices[n], single.indices[0])


def chain(*ids: str) -> list[Concept]:
    return [Concept(id=name, level=i, parents=(ids[i - 1],) if i else ()) for i, name in enumerate(ids)]


def constant(concepts: list[Concept], values: dict[str, float]) -> BankExpander:
    """Lenses that say the same of every row."""
    pack = make(concepts=concepts, widths=())
    logits = torch.tensor([[values[concept.id]] for concept in pack.concepts]).logit()
    pack = pack.replace(tensors={"w0": torch.zeros_like(pack.tensors["w0"]), "b0": logits})
    return BankExpander(Bank(pack), 1)


def test_a_parent_gives_way_to_its_child_and_only_then():
    whole = constant(chain("animal", "dog", "poodle"), {"animal": 0.9, "dog": 0.5, "poodle": 0.8})
    assert [c.id for c, _ in whole.expand(rows(1), top_k=3, depth=2).row(0)] == ["poodle"]
    assert [c.id for c, _ in whole.expand(rows(1), top_k=3, depth=1).row(0)] == ["dog"]
    assert [c.id for c, _ in whole.expand(rows(1), top_k=3, depth=0).row(0)] == ["animal"]
    # dog is not among the best two, so animal and poodle, which are not parent and child, both stay
    assert [c.id for c, _ in whole.expand(rows(1), top_k=2, depth=1).row(0)] == ["dog"]


def test_a_child_below_the_top_does_not_suppress_its_parent():
    concepts = [*chain("animal", "dog"), Concept(id="car"), Concept(id="tree")]
    whole = constant(concepts, {"animal": 0.9, "dog": 0.2, "car": 0.8, "tree": 0.7})
    assert [c.id for c, _ in whole.expand(rows(1), top_k=3, depth=3).row(0)] == ["animal", "car", "tree"]


def test_a_row_that_is_not_a_number_has_no_concepts_and_leaves_its_neighbours_alone():
    whole, x = BankExpander(Bank(make([3, 8, 20])), 1), rows(3)
    before = whole.expand(x, 4, 3)
    x[1] = torch.nan
    after = whole.expand(x, 4, 3)
    assert after.row(1) == []
    assert torch.equal(after.indices[[0, 2]], before.indices[[0, 2]])


def test_equal_scores_are_ordered_as_the_lenses_are():
    concepts = [Concept(id=f"r{i}") for i in range(40)]
    whole = constant(concepts, {concept.id: 0.9 - 1e-3 * (i % 2) for i, concept in enumerate(concepts)})
    assert whole.expand(rows(1), top_k=6).indices.tolist() == [[0, 2, 4, 6, 8, 10]]


def test_what_cannot_be_expanded_is_refused():
    pack = make([3, 8])
    with pytest.raises(InvalidRequest, match="choose 1–2"):
        BankExpander(Bank(pack), 3)
    with pytest.raises(InvalidRequest, match="holds a part"):
        BankExpander(Bank(pack, slice(0, 4)), 1)
    with pytest.raises(InvalidRequest, match=r"Bank\.top"):
        BankExpander(Bank(make([4], widths=(), output="topk", k=2)), 1)
    with pytest.raises(InvalidRequest, match="at least 1"):
        BankExpander(Bank(pack), 1).expand(rows(1), top_k=0)
