"""The monitor gives every row to its own request, and keeps packs no longer than they are needed."""

import numpy as np
import pytest
import torch

from lenses.packs import calibrated_by_hand, make, one_by_one, rows
from steerscope.lenses.monitor import Monitor, Seat, WatchPlan
from steerscope.lenses.reader import PackOptions, Reader, Registered
from steerscope.lenses.readings import Notes, Readings
from steerscope.lenses.rules import MOST_RULES, compile_rules
from steerscope.specs import Add
from steerscope.specs.errors import InvalidRequest
from steerscope.specs.tokens import EVERYWHERE
from steerscope.specs.watch import Watch, flag, steer, stop, when

PACK = make([3, 6, 12], calibrated=True)


def plan(pack=PACK, options: PackOptions | None = None, **watch) -> WatchPlan:
    registered = Registered(pack, options or PackOptions())
    spec = Watch(pack=pack, **watch)
    compiled, problems = compile_rules(spec.rules, pack, registered.readable)
    assert not problems
    return WatchPlan(registered, (3, "resid_post"), EVERYWHERE, compiled, spec)


def admit(monitor: Monitor, made: WatchPlan) -> Seat:
    """A seat, for a pack that is kept from now on."""
    monitor.keep(Reader(made.registered))
    return monitor.admit(made)


def expected(x: torch.Tensor, pack=PACK) -> torch.Tensor:
    return calibrated_by_hand(pack, one_by_one(pack, x))


# --- readers


@pytest.mark.parametrize("workspace", [5_000, 1 << 28])
def test_a_reader_ranks_what_single_lenses_say_in_any_workspace(workspace: int):
    x = rows(40)
    reader = Reader(Registered(PACK, PackOptions(workspace=workspace)))
    columns = torch.randint(len(PACK), (40, 5), generator=torch.Generator().manual_seed(0))
    found = reader.read(x, 4, columns)
    wanted = expected(x)
    torch.testing.assert_close(found.values, wanted.sort(descending=True).values[:, :4], atol=1e-5, rtol=0)
    torch.testing.assert_close(found.scores, wanted.gather(1, columns), atol=1e-5, rtol=0)
    said = found.values > 0
    torch.testing.assert_close(wanted.gather(1, found.indices.clamp(0))[said], found.values[said], atol=1e-5, rtol=0)


def test_a_score_of_nothing_is_not_reported():
    quiet = PACK.replace(tensors={"floor": torch.full((len(PACK),), 0.99999)})
    found = Reader(Registered(quiet)).read(rows(3), 4)
    assert (found.indices == -1).all()
    assert (found.values == 0).all()


def test_each_row_has_its_own_levels():
    reader = Reader(Registered(PACK))
    views = torch.tensor([reader.view(None), reader.view((0,)), reader.view((1, 2)), reader.view((0,))])
    found = reader.read(rows(4), 21, view=views)
    levels = [{PACK.concepts[i].level for i in line if i >= 0} for line in found.indices.tolist()]
    assert levels[1:] == [{0}, {1, 2}, {0}]
    assert levels[0] == {0, 1, 2}


def test_in_tiers_rules_may_name_what_is_always_there():
    deep = PACK.concepts[-1].id
    registered = Registered(PACK, PackOptions(budget=12, base_levels=1, pinned=(deep,)))
    assert registered.readable(0)
    assert registered.readable(len(PACK) - 1)
    assert not registered.readable(len(PACK) - 2)
    x = rows(5)
    columns = torch.tensor([[registered.column(2), registered.column(len(PACK) - 1)]]).expand(5, 2)
    reader = Reader(registered)
    found = reader.read(x, 3, columns)
    torch.testing.assert_close(found.scores, expected(x)[:, [2, len(PACK) - 1]], atol=1e-5, rtol=0)
    assert "not in pack" in str(Registered(PACK, PackOptions(budget=12, pinned=("no",))).problems()[0])


# --- monitors


def test_rows_of_many_requests_are_noted_by_each_and_only_by_it():
    monitor = Monitor(slots=4)
    x = rows(9)
    wanted = expected(x)
    lens = int(wanted[1].argmax())
    bound = float(wanted[1, lens]) - 1e-3
    ruled = plan(rules=[when(PACK.concepts[lens].id, above=bound).then(flag("high"))], top_k=2)
    seats = [admit(monitor, ruled), admit(monitor, plan(top_k=5))]
    notes = [ruled.notes(2), plan(top_k=5).notes(1)]
    slot = torch.tensor([seats[0].slot] * 4 + [seats[1].slot] * 5)
    position = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])
    seen = monitor.look(seats[0].reader, x, 5, slot, position, None).to_host()
    notes[0].note(seen, 0, [0, 1, 2, 3])
    notes[1].note(seen, 4, [0, 1, 2, 3, 4])
    first, firings = notes[0].finish(4, [50, 51, 52, 53, 54])
    fires = [t for t in range(4) if wanted[t, lens] > bound and not (t and wanted[t - 1, lens] > bound)]
    assert [firing.position for firing in firings] == fires
    assert first.values.shape == (4, 2)
    assert first.token_ids.tolist() == [50, 51, 52, 53]
    second, none = notes[1].finish(5, list(range(60, 66)))
    assert none == ()
    np.testing.assert_allclose(second.values, wanted[4:].sort(descending=True).values[:, :5], atol=1e-5)


def test_packs_stay_until_they_are_dropped_and_nobody_is_watched():
    monitor = Monitor(slots=4)
    kept = Registered(PACK)
    seats = [admit(monitor, plan()) for _ in range(2)]
    assert len(monitor) == 1
    monitor.drop(kept)
    monitor.release(seats[0])
    assert len(monitor) == 1, "a request is watched"
    monitor.release(seats[1])
    assert len(monitor) == 0
    monitor.release(admit(monitor, plan()))
    assert len(monitor) == 1, "it was not dropped"
    monitor.close()
    assert len(monitor) == 0


def test_a_gate_number_is_a_rule_of_the_request_and_zero_is_always_open():
    monitor = Monitor(slots=4)
    push = steer(Add(vector=[1.0] * 24, layers=0))
    seat = admit(monitor, plan(rules=[when(PACK.concepts[0].id, above=0.0).then(push)]))
    assert monitor.gate(seat, 0) == 0
    assert monitor.gate(seat, 1) == seat.slot * MOST_RULES
    monitor.look(seat.reader, rows(1) * 0, 1, torch.tensor([seat.slot]), torch.tensor([0]), None)
    assert monitor.rules.gates[0] == 1


# --- notes


def notes(*rules, top_k=2, prompt=3) -> Notes:
    return plan(rules=rules, top_k=top_k).notes(prompt)


def part(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((n, 2), 0.5, np.float32), np.tile([0, 1], (n, 1))


def test_rows_beyond_the_end_and_rows_seen_twice_leave_no_trace():
    made = notes(when(PACK.concepts[0].id, above=0.1).then(flag("f")))
    made.add([0, 1, 2], *part(3))
    made.add([1, 2, 3, 4], *part(4))
    made.fire(1, [0], [], np.array([0.2]))
    made.fire(4, [0], [], np.array([0.3]))
    readings, firings = made.finish(4, list(range(10, 20)))
    assert readings.positions.tolist() == [0, 1, 2, 3]
    assert [firing.position for firing in firings] == [1]


def test_the_first_stop_decides_how_much_is_kept():
    concept = PACK.concepts[0].id
    made = notes(*(when(concept, above=bound).then(stop(name)) for name, bound in (("a", 0.1), ("b", 0.2))))
    assert made.kept is None
    made.fire(5, [1, 0], [], np.array([0.3, 0.3]))
    made.fire(6, [0], [], np.array([0.3, 0.3]))
    assert made.stopped is not None
    assert (made.stopped.rule, made.stopped.position, made.kept) == ("b", 5, 4)
    made.restart()
    assert made.kept is None
    made.fire(0, [0], [], np.array([0.3, 0.3]))
    assert made.kept == 1, "one fired in the prompt keeps the first token"


def test_readings_are_a_sequence_and_a_table():
    made = notes()
    made.add([0, 2], *part(2))
    readings, _ = made.finish(3, [7, 8, 9, 9])
    assert isinstance(readings, Readings)
    assert [r.position for r in readings] == [0, 2]
    assert readings[1:] == [readings[1]]
    assert readings.of(PACK.concepts[1].id).tolist() == [0.5, 0.5]
    assert readings.of(PACK.concepts[2].id).tolist() == [0.0, 0.0]
    assert readings.table()["token_id"] == [7, 7, 9, 9]
    with pytest.raises(InvalidRequest):
        readings.of("nobody")
