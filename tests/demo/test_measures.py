"""The demo's instruments refuse what they cannot measure."""

import pytest

from steerscope.demo.measures import word_odds
from steerscope.engines.hf import HFEngine
from steerscope.specs.errors import InvalidRequest
from support import tiny


def test_words_of_several_tokens_are_refused_by_name() -> None:
    with HFEngine(tiny.model(), tiny.tokenizer(), name="tiny").sync as engine:
        assert isinstance(engine.aio, HFEngine)
        (found,) = word_odds(engine.aio, ["The lazy dog was"], ["lazy"], ["lazy"], [None])
        assert found == 0
        with pytest.raises(InvalidRequest, match=r"words: 'outraged' is \d+ tokens; choose words of one token"):
            word_odds(engine.aio, ["The lazy dog was"], ["lazy"], ["lazy", "outraged"], [None])
