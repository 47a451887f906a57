"""Packs come and go while requests run: nothing waits for a pack but what needs it, and nothing of it stays."""

import gc
import itertools
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.conftest import ENGINES
from engines.test_watching import LAYER, PACK, PROMPT, SHORT, begin, monitor_of, scores_of
from lenses.packs import make
from steerscope.engines.results import EndEvent, TokenEvent
from steerscope.engines.sync import SyncEngine
from steerscope.lenses import Bank, Pack
from steerscope.lenses.monitor import Monitor
from steerscope.lenses.reader import Registered
from steerscope.specs import Capture, InvalidRequest, Sampling
from steerscope.specs.errors import EngineClosed, PackNotLoaded, RequestFailed, TimedOut
from steerscope.specs.watch import Watch
from support.waiting import HUNG_S

_seeds = itertools.count(7)
LONG = Sampling(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[SyncEngine]:
    with begin(request.param) as made:
        made.register_pack("p", PACK)
        yield made


def other() -> Pack:
    """A pack that no test has had: of those that came with a request, some stay for the next."""
    seed = next(_seeds)
    pack = make([3, 5], hidden=64, seed=seed)
    return pack.replace(info=pack.info.model_copy(update={"layer": LAYER, "model": "llama", "name": f"seed {seed}"}))


class Door:
    """Loads stop at it while it is closed; workers of these tests are in this process."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.banks: weakref.WeakSet[Bank] = weakref.WeakSet()
        self.error: Exception | None = None

    def open(self) -> None:
        self.opened.set()


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    made = Door()

    class Held(Bank):
        def __init__(self, *args: Any, **options: Any) -> None:
            made.reached.set()
            assert made.opened.wait(HUNG_S)
            if made.error is not None:
                raise made.error
            super().__init__(*args, **options)
            made.banks.add(self)

    monkeypatch.setattr("steerscope.lenses.reader.Bank", Held)
    yield made
    made.open()


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made; none may stay."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    yield tmp_path / "scratch"
    until(lambda: not any((tmp_path / "scratch").iterdir()))


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + HUNG_S
    while not holds():
        assert time.monotonic() < end, "it has not come about"
        time.sleep(0.005)


def beside(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Do something in another thread; what came of it, a result or an error, is in the list."""
    told: list[Any] = []

    def run() -> None:
        try:
            told.append(work())
        except Exception as error:
            told.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, told


def reads(engine: SyncEngine, pack: Pack, name: "str | Pack") -> None:
    """The lenses of this pack, run one by one on the captured rows, say what the readings say."""
    found = engine.generate(PROMPT, SHORT, watch=Watch(pack=name, top_k=3), capture=Capture(layers=LAYER))
    assert len(found.readings) == found.rows.n > 0
    for scores, reading in zip(scores_of(found, pack), found.readings, strict=True):
        said = [concept.probability for concept in reading.concepts]
        assert said == pytest.approx(scores.sort(descending=True).values[:3].tolist(), abs=1e-5)


def test_a_stream_goes_on_while_a_pack_is_being_loaded(engine: SyncEngine, door: Door):
    pack = other()
    thread, told = beside(lambda: engine.register_pack("slow", pack))
    assert door.reached.wait(HUNG_S)
    events = list(engine.stream(PROMPT, LONG, watch=Watch(pack="p", top_k=1)))
    assert sum(isinstance(event, TokenEvent) for event in events) == 40
    assert isinstance(events[-1], EndEvent)
    assert engine.stats()["finished"] > 0
    assert thread.is_alive()
    assert "slow" not in engine.packs
    door.open()
    thread.join(HUNG_S)
    assert told == [pack]
    reads(engine, pack, "slow")
    engine.unregister_pack("slow")


def test_a_request_that_brings_its_pack_waits_for_it_alone_and_can_be_cancelled(engine: SyncEngine, door: Door):
    pack = other()
    first, found = beside(lambda: engine.generate(PROMPT, SHORT, watch=Watch(pack=pack)))
    assert door.reached.wait(HUNG_S)
    named = engine.stream(PROMPT, SHORT, watch=Watch(pack=pack), request_id="named")
    second, ended = beside(lambda: list(named))
    until(lambda: engine.cancel("named"))
    second.join(HUNG_S)
    assert ended[0][-1].generation.finish_reason == "cancelled"
    assert engine.generate(PROMPT, SHORT).token_ids
    assert first.is_alive()
    door.open()
    first.join(HUNG_S)
    assert len(found[0].readings) == len(found[0].prompt_token_ids) + 9


@pytest.mark.parametrize("stored", [False, True])
def test_a_registration_that_takes_too_long_leaves_nothing(
    engine: SyncEngine, door: Door, tmp_path: Path, stored: bool
):
    pack, before = other(), len(monitor_of(engine))
    if stored:
        pack.save(tmp_path / "pack")
    given = tmp_path / "pack" if stored else pack
    with pytest.raises(TimedOut, match=f"registering pack {pack.info.name!r} took longer than 0.2 s; it is not"):
        engine.register_pack("late", given, timeout_s=0.2)
    assert "late" not in engine.packs
    assert door.reached.wait(HUNG_S)
    with pytest.raises(TimedOut):
        engine.register_pack("late", given, timeout_s=0.1)
    door.open()
    until(lambda: not any(thread.name == "steerscope-pack" for thread in threading.enumerate()))
    until(lambda: engine.stats()["packs"] == len(monitor_of(engine)) == before)
    gc.collect()
    assert not door.banks, "weights that no request needs"
    engine.register_pack("late", given)
    reads(engine, pack, "late")
    engine.unregister_pack("late")
    until(lambda: engine.stats()["packs"] == before)
    gc.collect()
    assert not door.banks


def test_the_same_name_can_be_registered_while_its_first_load_still_hangs(engine: SyncEngine, door: Door, monkeypatch):
    pack = other()
    with pytest.raises(TimedOut):
        engine.register_pack("again", pack, timeout_s=0.2)
    assert door.reached.wait(HUNG_S)
    with monkeypatch.context() as free:
        free.setattr("steerscope.lenses.reader.Bank", Bank)
        engine.register_pack("again", pack)
    door.open()
    until(lambda: not any(thread.name == "steerscope-pack" for thread in threading.enumerate()))
    gc.collect()
    assert not door.banks
    reads(engine, pack, "again")
    engine.unregister_pack("again")


def test_an_engine_that_does_not_answer_says_so_and_registers_nothing_later(engine: SyncEngine, monkeypatch):
    monkeypatch.setattr("steerscope.engines.engine_thread._ANSWER_S", 0.1)
    before, stuck = len(monitor_of(engine)), threading.Event()
    engine.aio._put(lambda: stuck.wait(HUNG_S) and None)  # type: ignore[attr-defined]
    try:
        with pytest.raises(TimedOut, match="registering pack 'seed .*' was not answered by the engine of llama within"):
            engine.register_pack("x", other())
        if hasattr(engine.aio, "describe"):
            with pytest.raises(TimedOut, match=r"stats\(\) was not answered by the engine of llama within"):
                engine.stats()
    finally:
        stuck.set()
    monkeypatch.undo()
    until(lambda: not any(thread.name == "steerscope-pack" for thread in threading.enumerate()))
    assert engine.stats()["packs"] == before
    assert "x" not in engine.packs


def test_a_pack_takes_the_place_of_another_that_the_engine_is_too_busy_to_drop(
    engine: SyncEngine, door: Door, monkeypatch: pytest.MonkeyPatch
):
    door.open()
    before, free = engine.stats()["packs"], threading.Event()
    engine.register_pack("x", other())
    keep, new = engine.aio._lenses.register, other()

    def keep_and_hang(*given: Any) -> None:
        keep(*given)
        monkeypatch.setattr("steerscope.engines.engine_thread._ANSWER_S", 0.1)
        engine.aio._put(lambda: free.wait(HUNG_S) and None)  # type: ignore[attr-defined]

    monkeypatch.setattr(engine.aio._lenses, "register", keep_and_hang)
    try:
        assert engine.register_pack("x", new) is engine.packs["x"] is new
        with pytest.raises(TimedOut, match="unregistering pack 'seed .*' was not answered by the engine of llama"):
            engine.unregister_pack("x")
    finally:
        free.set()
    monkeypatch.undo()
    assert "x" not in engine.packs
    until(lambda: engine.stats()["packs"] == before)


def test_a_timeout_of_what_an_engine_was_asked_to_do_is_told_as_such(engine: SyncEngine, monkeypatch):
    def late(*_: object, **__: object) -> None:
        raise TimeoutError("RPC call to stats timed out.")

    with pytest.raises(TimedOut, match=r"^looking failed: RPC call to stats timed out\.; try again$"):
        engine.aio._call(late, "looking")  # type: ignore[attr-defined]
    if hasattr(engine.aio, "_llm"):
        monkeypatch.setattr(engine.aio._llm, "collective_rpc", late)
        with pytest.raises(TimedOut, match=r"stats\(\) failed: RPC call to stats timed out"):
            engine.stats()
        with pytest.raises(TimedOut, match="loading a pack failed: RPC call"):
            engine.register_pack("x", other())
        assert "x" not in engine.packs


def test_the_time_for_a_registration_begins_before_its_files_are_read(engine: SyncEngine, tmp_path: Path, monkeypatch):
    pack, load = other(), Pack.load
    pack.save(tmp_path / "pack")
    with monkeypatch.context() as slow:
        slow.setattr(Pack, "load", lambda path: time.sleep(0.3) or load(path))
        with pytest.raises(TimedOut, match="took longer than 0.2 s; it is not registered"):
            engine.register_pack("slow", tmp_path / "pack", timeout_s=0.2)
    assert "slow" not in engine.packs


def test_a_pack_that_cannot_be_loaded_is_told_and_ends_only_what_needs_it(engine: SyncEngine, door: Door):
    pack, before = other(), engine.stats()["packs"]
    door.error = RuntimeError("no memory\nat all")
    door.open()
    with pytest.raises(PackNotLoaded, match="^pack 'seed .*' could not be loaded: no memory; see that") as told:
        engine.register_pack("bad", pack)
    assert "\n" not in str(told.value)
    with pytest.raises(RequestFailed, match="pack 'seed .*' could not be loaded: no memory") as failed:
        engine.generate([PROMPT] * 3, SHORT, watch=[None, Watch(pack=pack), Watch(pack="p")])
    assert [one is None for one in failed.value.completed] == [False, True, False]
    assert engine.stats()["packs"] == before
    door.error = None
    reads(engine, pack, pack)


def test_a_budget_that_holds_too_little_is_told_as_such(engine: SyncEngine):
    with pytest.raises(InvalidRequest, match=r"budget: holds 1 lenses; the base levels"):
        engine.register_pack("tiers", PACK, budget=1)
    assert "tiers" not in engine.packs


def test_a_pack_that_is_unregistered_under_load_goes_with_the_last_request_that_reads_with_it(
    engine: SyncEngine, door: Door
):
    door.open()
    before = engine.stats()["packs"]
    engine.register_pack("x", other())
    events = engine.stream(PROMPT, LONG, watch=Watch(pack="x"))
    next(events)
    engine.register_pack("x", other())
    engine.unregister_pack("x")
    assert len(list(events)[-1].generation.readings) == len(engine.aio.tokenize(PROMPT).token_ids) + 39
    engine.generate("x", SHORT)  # workers hear of an end with the next step
    until(lambda: engine.stats()["packs"] == before)
    gc.collect()
    assert not door.banks


def test_a_pack_whose_memory_cannot_be_freed_ends_no_request(engine: SyncEngine, monkeypatch, caplog):
    drop = Monitor.drop

    def fail(self: Monitor, registered: Registered) -> None:
        drop(self, registered)
        raise RuntimeError("the device says no")

    engine.register_pack("x", other())
    unwatched = engine.stream(PROMPT, Sampling(max_tokens=100, ignore_eos=True))
    watched = engine.stream(PROMPT, SHORT, watch=Watch(pack="x"))
    next(unwatched)
    next(watched)
    monkeypatch.setattr(Monitor, "drop", fail)
    engine.unregister_pack("x")
    assert [list(events)[-1].generation.finish_reason for events in (watched, unwatched)] == ["length"] * 2
    until(lambda: "of pack 'seed" in caplog.text)
    assert "was not freed: the device says no" in caplog.text
    assert engine.generate(PROMPT, SHORT, watch=Watch(pack="p")).readings


def test_a_pack_from_a_folder_is_not_written_again_and_read_as_it_was(engine: SyncEngine, tmp_path: Path, monkeypatch):
    pack = other()
    pack.save(tmp_path / "pack")
    with monkeypatch.context() as writing:
        writing.setattr(Pack, "save", lambda *_: pytest.fail("it was written again"))
        engine.register_pack("stored", tmp_path / "pack")
    reads(engine, pack, "stored")
    loaded = Pack.load(tmp_path / "pack")
    other().save(tmp_path / "pack")
    engine.unregister_pack("stored")
    engine.register_pack("stored", loaded)
    reads(engine, pack, "stored")
    engine.unregister_pack("stored")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux which files are mapped")
def test_a_pack_from_memory_keeps_no_temporary_file_mapped(engine: SyncEngine):
    pack = engine.register_pack("x", other())
    reads(engine, pack, "x")
    assert "steerscope-pack-" not in Path("/proc/self/maps").read_text(), "its disk and memory are in use until it goes"
    engine.unregister_pack("x")


def test_two_threads_that_register_one_name_leave_one_pack(engine: SyncEngine):
    before = engine.stats()["packs"]
    done = [beside(lambda: engine.register_pack("same", other())) for _ in range(4)]
    for thread, _ in done:
        thread.join(HUNG_S)
    assert all(isinstance(told[0], Pack) for _, told in done)
    assert engine.stats()["packs"] == before + 1
    reads(engine, engine.packs["same"], "same")
    engine.unregister_pack("same")
    until(lambda: engine.stats()["packs"] == before)


@pytest.mark.parametrize("kind", ENGINES)
def test_who_registers_hears_that_the_engine_was_closed(kind: str, door: Door):
    engine = begin(kind)
    registering, told = beside(lambda: engine.register_pack("x", other()))
    asking, failed = beside(lambda: engine.generate(PROMPT, SHORT, watch=Watch(pack=other())))
    assert door.reached.wait(HUNG_S)
    until(lambda: bool(engine.aio._waiting))  # type: ignore[attr-defined]
    closing, _ = beside(engine.close)
    registering.join(HUNG_S)
    asking.join(HUNG_S)
    assert isinstance(told[0], EngineClosed)
    assert failed[0].finish_reason == "cancelled"
    door.open()
    closing.join(HUNG_S)
    assert not any(thread.name == "steerscope-pack" for thread in threading.enumerate())
