"""Stress of both targets that run here, and proof that its oracle would notice: a result with one thing changed in it
is wrong, and it says what."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bench.stress.__main__ import app
from bench.stress.run import Plan, oracle_of, prepare, run, start_engine, stress
from serving.live import live
from steerscope.capture.rows import Rows
from steerscope.engines.api import Engine
from steerscope.engines.results import TokenPrompt
from steerscope.lenses import Pack
from steerscope.specs import Add, Capture, InvalidRequest, Sampling, Steering
from steerscope.specs.watch import Watch, steer, stop, when
from support.checking import check
from support.ledger import Ledger, Outcome
from support.model import PACK, VOCAB
from support.oracle import Oracle
from support.targets import EngineTarget, ServerTarget, check_loopback
from support.workload import Request, draw

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

PLAN = Plan(requests=48, concurrent=12, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("stress"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return oracle_of(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    made = start_engine("hf", folder / "model", Pack.load(folder / PACK), PLAN, "float32", 0)
    yield made
    made.sync.close()


def balanced(found: Ledger) -> None:
    assert found.wrong == []
    assert found.sent == found.finished + found.cancelled + found.refused == PLAN.requests
    assert found.reserved_bytes == found.delivered_bytes + found.released_bytes
    assert min(found.rows, found.tokens, found.readings, found.delivered_bytes, found.released_bytes) > 0


def test_an_engine_under_stress_gives_every_row_and_token_as_plain_transformers_does(
    engine: Engine, oracle: Oracle
) -> None:
    found, _ = asyncio.run(stress(EngineTarget(engine), oracle, PLAN))
    balanced(found)


@pytest.mark.slow
def test_a_server_under_stress_does_too(folder: Path, oracle: Oracle) -> None:
    def start() -> Engine:
        return start_engine("hf", folder / "model", Pack.load(folder / PACK), PLAN, "float32", 0)

    # Rows whose client was killed while its answer was on the way are dropped when their time is over.
    with live(start, capture_ttl_s=10.0) as server:
        found, _ = asyncio.run(_on_server(server.url, oracle))
    balanced(found)


async def _on_server(url: str, oracle: Oracle) -> tuple[Ledger, list[int]]:
    return await stress(ServerTarget(url), oracle, PLAN)


REQUEST = Request(
    prompt=[40, 41, 42, 43, 44],
    sampling=Sampling(max_tokens=8, ignore_eos=True, logprobs=1),
    steer=Steering.of(Add(vector=np.ones(128, np.float32), scale=0.2, layers=1, tokens="generated")),
    capture=Capture(layers="1-2"),
    watch=Watch(
        pack=PACK,
        top_k=2,
        rules=[
            when("c3", above=0.4).then(steer(Add(vector=np.ones(128, np.float32), scale=0.3, layers=0), name="push")),
            when("c5", above=0.999).then(stop("never")),
        ],
    ),
    kind=("whole",),
)


def shifted(found: Outcome) -> Outcome:
    assert found.rows is not None
    moved = {key: tensor.roll(1, 0) for key, tensor in found.rows.tensors.items()}
    return replace(found, rows=Rows(moved, found.rows.labels, found.rows.model, None, ()))


def swapped(found: Outcome) -> Outcome:
    assert found.rows is not None
    first, second = found.rows.tensors.values()
    keys = list(found.rows.tensors)
    return replace(found, rows=Rows({keys[0]: second, keys[1]: first}, found.rows.labels, found.rows.model, None, ()))


def one_layer(found: Outcome) -> Outcome:
    assert found.rows is not None
    key, tensor = next(iter(found.rows.tensors.items()))
    return replace(found, rows=Rows({key: tensor}, found.rows.labels, found.rows.model, None, ()))


TAMPERED: dict[str, tuple[Callable[[Outcome], Outcome], str]] = {
    "a token": (lambda o: replace(o, token_ids=[(o.token_ids[0] + 1) % VOCAB, *o.token_ids[1:]]), "below the best"),
    "one token too few": (lambda o: replace(o, token_ids=o.token_ids[:-1]), "ended with length"),
    "rows shifted by one": (shifted, "is off by"),
    "all rows lost": (lambda o: replace(o, rows=None), "its rows are missing"),
    "the rows of a layer lost": (one_layer, "instead of [(1, 'resid_post'), (2, 'resid_post')]"),
    "rows of another layer": (swapped, "is off by"),
    "a log probability": (
        lambda o: replace(o, logprobs=[(t, v - 0.01) for t, v in o.logprobs]),
        "a log probability is off",
    ),
    "a reading lost": (lambda o: replace(o, readings=o.readings[:-1]), "readings of rows"),
    "a score": (
        lambda o: replace(o, readings=[(row, [(c, s + 1e-3) for c, s in top]) for row, top in o.readings]),
        "the reading of row 0",
    ),
    "a firing lost": (lambda o: replace(o, firings=o.firings[1:]), "rules did"),
    "a stream that skips": (lambda o: replace(o, streamed=o.token_ids[1:]), "the stream brought"),
    "a stop out of nowhere": (lambda o: replace(o, reason="rule", rule="never"), "ended with rule"),
}


@pytest.fixture(scope="module")
def outcome(engine: Engine) -> Outcome:
    asked = {"steer": REQUEST.steer, "capture": REQUEST.capture, "watch": REQUEST.watch}
    (found,) = Outcome.of(engine.sync.generate(TokenPrompt(REQUEST.prompt), REQUEST.sampling, **asked))  # type: ignore[call-overload]
    assert found.firings, "the rule never fired: choose another"
    return found


def test_what_is_right_passes(oracle: Oracle, outcome: Outcome) -> None:
    ledger = Ledger()
    check(oracle, REQUEST, outcome, ledger, 1e-4)
    assert ledger.wrong == []
    assert (ledger.tokens, ledger.rows, ledger.readings) == (8, 24, 12)


@pytest.mark.parametrize("name", TAMPERED)
def test_one_thing_changed_is_noticed(name: str, oracle: Oracle, outcome: Outcome) -> None:
    change, word = TAMPERED[name]
    ledger = Ledger()
    check(oracle, REQUEST, change(outcome), ledger, 1e-4)
    assert any(word in line for line in ledger.wrong), ledger.wrong
    assert not ledger.undecided


def test_a_text_that_goes_on_after_its_stop_string_is_noticed(oracle: Oracle, outcome: Outcome) -> None:
    first, second = outcome.token_ids[:2]
    request = replace(REQUEST, sampling=REQUEST.sampling.model_copy(update={"stop": (f"t{first} t{second}",)}))
    ledger = Ledger()
    check(oracle, request, outcome, ledger, 1e-4)
    assert [line.partition(": ")[2] for line in ledger.wrong] == ["the text goes on after a stop string"]


def test_a_score_on_a_threshold_excuses_no_lost_rows_and_no_false_end(
    oracle: Oracle, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "_margin", lambda *_: 0.0)
    ledger = Ledger()
    check(oracle, REQUEST, replace(outcome, rows=None, streamed=[]), ledger, 1e-4)
    assert len(ledger.wrong) == 2
    check(oracle, REQUEST, replace(outcome, firings=[]), ledger, 1e-4)
    assert (len(ledger.wrong), ledger.undecided) == (2, 1)


@pytest.mark.parametrize(
    "forgotten", [{"steer": Steering()}, {"watch": replace(REQUEST).watch.model_copy(update={"rules": ()})}]
)
def test_an_engine_that_forgets_to_steer_is_noticed(
    forgotten: dict[str, object], engine: Engine, oracle: Oracle
) -> None:
    """The request as it was asked, and what came of another in which the steering, or the rules, were left out."""
    asked = {"steer": REQUEST.steer, "capture": REQUEST.capture, "watch": REQUEST.watch, **forgotten}
    (found,) = Outcome.of(engine.sync.generate(TokenPrompt(REQUEST.prompt), REQUEST.sampling, **asked))  # type: ignore[call-overload]
    ledger = Ledger()
    check(oracle, REQUEST, found, ledger, 1e-4)
    assert any("is off by" in line for line in ledger.wrong)


def test_a_ledger_that_does_not_come_out_says_so() -> None:
    lost = Ledger(sent=3, finished=1, cancelled=1, reserved_bytes=10, delivered_bytes=4, released_bytes=5)
    assert [line.partition(",")[0] for line in lost.problems()] == ["3 sent", "10 bytes reserved"]


def test_a_seed_always_draws_the_same_requests() -> None:
    def some(seed: int) -> list[Request]:
        rng = np.random.default_rng(seed)
        return [draw(rng, list(range(20, 84))) for _ in range(40)]

    assert some(1) == some(1)
    assert some(1) != some(2)


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://example.org", "http://127.0.0.1.example.org"])
def test_only_this_machine_is_stressed(url: str) -> None:
    with pytest.raises(InvalidRequest, match="is not this machine"):
        check_loopback(url)


@pytest.mark.slow
def test_the_command_writes_the_ledger_and_fails_when_something_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "ledger.json"
    words = [str(tmp_path / "model"), "--requests", "16", "--concurrent", "8", "--out", str(output)]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert '"holds": true' in output.read_text()
    monkeypatch.setattr("steerscope.engines.hf.taps.apply", lambda h, *_: torch.zeros_like(h, dtype=torch.float32))
    monkeypatch.setattr("steerscope.engines.hf.engine.self_test", lambda *_: None)
    assert run(tmp_path / "model", Plan(requests=16, concurrent=8))["wrong"]
    assert CliRunner().invoke(app, words).exit_code == 1
