"""LensSlots: which lens is in which slot of the hot slab, and which are evicted. Holds no weights.

Lenses are placed and evicted in units (the children of one concept, or a part of them). A lens of several units has one
slot and stays until the last of them is evicted. The least recently used unit goes first; pinned lenses stay.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

from steerscope.specs.errors import CapacityExceeded


class LensSlots:
    def __init__(self, count: int, pinned: Sequence[int]) -> None:
        """Give pinned lenses the first slots, in order."""
        if len(pinned) > count:
            raise CapacityExceeded(f"{len(pinned)} pinned lenses do not fit into {count} slots; raise the budget")
        self.of: dict[int, int] = {lens: slot for slot, lens in enumerate(pinned)}
        self._pinned = frozenset(pinned)
        self._free = set(range(len(pinned), count))
        self._units: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()
        self._uses: dict[int, int] = {}
        self.room = count - len(pinned)
        self.changes = 0  # number of placements and evictions

    def __contains__(self, unit: Hashable) -> bool:
        return unit in self._units

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate units, the least recently used first."""
        return iter(self._units)

    def lenses(self, unit: Hashable) -> tuple[int, ...]:
        return self._units[unit]

    def touch(self, unit: Hashable) -> None:
        self._units.move_to_end(unit)

    def place(self, unit: Hashable, lenses: tuple[int, ...], locked: Collection[Hashable]) -> dict[int, int] | None:
        """Place a unit. Return slots of lenses to be loaded, or None if only locked units could be evicted."""
        moving = [lens for lens in lenses if lens not in self._pinned]
        for lens in moving:  # first, so that evicting other units keeps lenses of this one
            self._uses[lens] = self._uses.get(lens, 0) + 1
        self._units[unit] = lenses
        self.changes += 1
        missing = [lens for lens in moving if lens not in self.of]
        while len(self._free) < len(missing):
            oldest = next((other for other in self._units if other != unit and other not in locked), None)
            if oldest is None:
                self.evict(unit)
                return None
            self.evict(oldest)
        slots = self._take(len(missing))
        found = dict(zip(missing, slots, strict=True))
        self.of.update(found)
        return found

    def evict(self, unit: Hashable) -> None:
        self.changes += 1
        for lens in self._units.pop(unit):
            if lens in self._pinned:
                continue
            self._uses[lens] -= 1
            if not self._uses[lens]:
                del self._uses[lens]
                if lens in self.of:
                    self._free.add(self.of.pop(lens))

    def holders(self, lenses: Iterable[int]) -> list[Hashable]:
        """Return the units that contain any of these lenses."""
        wanted = set(lenses)
        return [unit for unit, members in self._units.items() if wanted.intersection(members)]

    def _take(self, count: int) -> list[int]:
        """Take free slots, consecutive ones if possible, so that a group is evaluated in one piece."""
        run: list[int] = []
        free = sorted(self._free)
        for slot in free:
            run = [*run, slot] if run and run[-1] + 1 == slot else [slot]
            if len(run) >= count:
                break
        chosen = run[:count] if len(run) >= count else free[:count]
        self._free.difference_update(chosen)
        return chosen
