"""What requests hold on the client's side while they run on vLLM: slots, counted once each, and given back."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from steerscope.capture.transport import Arena, Regions
from steerscope.core.slot_table import Column, Key
from steerscope.engines.plan import CapturePlan, Facts, Plan, Prompt
from steerscope.engines.vllm.client.capacity import Claim, Room
from steerscope.engines.vllm.settings import Settings
from steerscope.specs import Capture, Sampling
from steerscope.specs.errors import CapacityExceeded
from steerscope.specs.tokens import EVERYWHERE

KEYS: tuple[Key, ...] = ((0, "resid_post"), (1, "resid_post"))
FACTS = Facts("m", 2, 4, 100, 64, 4, {})


@pytest.fixture
def room(tmp_path: Path) -> Room:
    arena = Arena(tmp_path / "arena", 1 << 20, create=True)
    return Room(FACTS, torch.float32, Settings(slots=4, groups=4), dict.fromkeys(KEYS, 0), Regions(arena))


def plan(capture: CapturePlan | None = None, columns: tuple[Column, ...] = ()) -> Plan:
    return Plan("a", 0, Prompt([1, 2, 3]), Sampling(max_tokens=4), columns, (), capture)


def capturing(keys: tuple[Key, ...] = KEYS) -> CapturePlan:
    return CapturePlan(keys, keys, EVERYWHERE, Capture(layers="all"))


def steering(value: float) -> tuple[Column, ...]:
    vector = np.full(4, value, np.float32)
    return (Column(EVERYWHERE, 0, {KEYS[0]: vector}, {KEYS[0]: (0.0, value, 0.0, 0.0)}),)  # type: ignore[dict-item]


def claimed(room: Room, asked: Plan) -> Claim:
    claim = Claim(room, asked)
    claim.take()
    return claim


def test_whoever_asks_for_the_same_shares_slots_until_the_last_has_left(room: Room) -> None:
    capture, columns = capturing(), steering(1.0)
    asked = plan(capture, columns)
    alike = [claimed(room, one) for one in (asked, replace(asked, request_id="b"), asked)]  # by identity
    equal = claimed(room, plan(capturing(), steering(1.0)))  # by content
    other = claimed(room, plan(capturing(KEYS[:1]), steering(2.0)))
    numbers = [[slot.number for _, slot in claim._held] for claim in (*alike, equal)]
    assert numbers == [numbers[0]] * 4
    assert all(slot.users == 4 for _, slot in equal._held)
    assert not {id(slot) for _, slot in other._held} & {id(slot) for _, slot in equal._held}
    assert room.vectors.in_use == 2
    for claim in (*alike, other):
        claim.release()
        claim.release()  # twice is once
    assert (room.vectors.in_use, [slot.users for _, slot in equal._held]) == (1, [1, 1, 1])
    equal.release()
    assert room.vectors.in_use == room._groups.in_use == room._coefficients.in_use == 0


def test_a_slot_that_was_given_to_somebody_else_is_not_taken_for_the_last_one(room: Room) -> None:
    asked = plan(capturing())
    claimed(room, asked).release()
    others = [room._groups.hold(name)[0] for name in "xyz"]  # there are three: its own is one of them
    with pytest.raises(CapacityExceeded, match="capture group"):
        claimed(room, asked)
    room._groups.drop(others[0])
    again = claimed(room, asked)
    assert [slot.number for _, slot in again._held] == [others[0].number]
    assert room._groups.in_use == 3


def test_who_finds_no_room_holds_nothing(room: Room) -> None:
    for value in (1.0, 2.0, 3.0):
        claimed(room, plan(columns=steering(value)))
    before = room.vectors.in_use, room._coefficients.in_use, room._groups.in_use
    with pytest.raises(CapacityExceeded, match="vector slots"):
        claimed(room, plan(capturing(), (*steering(1.0), *steering(4.0))))
    assert (room.vectors.in_use, room._coefficients.in_use, room._groups.in_use) == before
    claimed(room, plan(capturing(), steering(1.0)))


def test_a_plan_with_a_watch_is_not_remembered(room: Room) -> None:
    """It keeps its lenses, which may be dropped."""
    watched = SimpleNamespace(key=KEYS[0])
    first = room.hold(replace(plan(capturing()), watch=watched))  # type: ignore[arg-type]
    assert room._last is None
    assert len(first) == 3  # tokens are captured, watched, or both
