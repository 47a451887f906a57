"""What requests hold on the client's side while they run on vLLM: slots, counted once each, and given back."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from steerscope.capture.transport import Arena, Regions
from steerscope.core.slot_table import Column, Key
from steerscope.engines.plan import CapturePlan, Facts, Plan, Prompt, RequestTemplate
from steerscope.engines.vllm.client.capacity import Allocation, Capacity
from steerscope.engines.vllm.settings import VLLMSettings
from steerscope.specs import Capture, Sampling
from steerscope.specs.errors import CapacityExceeded
from steerscope.specs.tokens import EVERYWHERE

KEYS: tuple[Key, ...] = ((0, "resid_post"), (1, "resid_post"))
FACTS = Facts("m", 2, 4, 100, 64, 4, {})


@pytest.fixture
def capacity(tmp_path: Path) -> Capacity:
    arena = Arena(tmp_path / "arena", 1 << 20, create=True)
    return Capacity(FACTS, torch.float32, VLLMSettings(slots=4, groups=4), dict.fromkeys(KEYS, 0), Regions(arena))


def plan(capture: CapturePlan | None = None, columns: tuple[Column, ...] = ()) -> Plan:
    template = RequestTemplate(3, 6, columns, (), capture)
    return Plan("a", 0, Prompt([1, 2, 3]), Sampling(max_tokens=4), template)


def capturing(keys: tuple[Key, ...] = KEYS) -> CapturePlan:
    return CapturePlan(keys, keys, EVERYWHERE, Capture(layers="all"))


def steering(value: float) -> tuple[Column, ...]:
    vector = np.full(4, value, np.float32)
    return (Column(EVERYWHERE, 0, {KEYS[0]: vector}, {KEYS[0]: (0.0, value, 0.0, 0.0)}),)  # type: ignore[dict-item]


def claimed(capacity: Capacity, asked: Plan) -> Allocation:
    allocation = Allocation(capacity, asked)
    allocation.take()
    return allocation


def test_whoever_asks_for_the_same_shares_slots_until_the_last_has_left(capacity: Capacity) -> None:
    capture, columns = capturing(), steering(1.0)
    asked = plan(capture, columns)
    alike = [claimed(capacity, one) for one in (asked, replace(asked, request_id="b"), asked)]  # by their template
    equal = claimed(capacity, plan(capturing(), steering(1.0)))  # by content
    other = claimed(capacity, plan(capturing(KEYS[:1]), steering(2.0)))
    numbers = [[slot.number for _, slot in allocation.held] for allocation in (*alike, equal)]
    assert numbers == [numbers[0]] * 4
    assert all(slot.users == 4 for _, slot in equal.held)
    assert not {id(slot) for _, slot in other.held} & {id(slot) for _, slot in equal.held}
    assert capacity.vectors.in_use == 2
    for allocation in (*alike, other):
        allocation.release()
        allocation.release()  # twice is once
    assert (capacity.vectors.in_use, [slot.users for _, slot in equal.held]) == (1, [1, 1, 1])
    equal.release()
    assert capacity.vectors.in_use == capacity.groups.in_use == capacity.coefficients.in_use == 0


def test_a_slot_that_another_request_took_is_not_reused(capacity: Capacity) -> None:
    asked = plan(capturing())
    claimed(capacity, asked).release()
    others = [capacity.groups.hold(name)[0] for name in "xyz"]  # there are three: its own is one of them
    with pytest.raises(CapacityExceeded, match="capture group"):
        claimed(capacity, asked)
    capacity.groups.drop(others[0])
    again = claimed(capacity, asked)
    assert [slot.number for _, slot in again.held] == [others[0].number]
    assert capacity.groups.in_use == 3


def test_who_finds_no_room_holds_nothing(capacity: Capacity) -> None:
    for value in (1.0, 2.0, 3.0):
        claimed(capacity, plan(columns=steering(value)))
    before = capacity.vectors.in_use, capacity.coefficients.in_use, capacity.groups.in_use
    with pytest.raises(CapacityExceeded, match="vector slots"):
        claimed(capacity, plan(capturing(), (*steering(1.0), *steering(4.0))))
    assert (capacity.vectors.in_use, capacity.coefficients.in_use, capacity.groups.in_use) == before
    claimed(capacity, plan(capturing(), steering(1.0)))


def test_a_template_is_freed_with_its_last_request(capacity: Capacity) -> None:
    """It may hold a lens pack, which must not wait for the garbage collector."""
    asked = plan(capturing(), steering(1.0))
    allocation = claimed(capacity, asked)
    allocation.entry("a")
    template = weakref.ref(asked.template)
    allocation.withdraw()
    gc.disable()
    try:
        del asked, allocation
        assert template() is None
    finally:
        gc.enable()
