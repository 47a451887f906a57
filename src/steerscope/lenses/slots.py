"""LensSlots: which lens is in which slot of the hot slab, and which are evicted. Holds no weights."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from steerscope.specs.errors import CapacityExceeded


class LensSlots:
    """Slots by lens. Pinned lenses have the first slots and stay; of the others the least recently used goes first."""

    def __init__(self, count: int, pinned: Sequence[int]) -> None:
        if len(pinned) > count:
            raise CapacityExceeded(f"{len(pinned)} pinned lenses do not fit into {count} slots; raise the budget")
        self.of: dict[int, int] = {lens: slot for slot, lens in enumerate(pinned)}
        self.room = count - len(pinned)
        self.changes = 0  # number of placements and evictions
        self._free = set(range(len(pinned), count))
        self._recent: OrderedDict[int, None] = OrderedDict()  # lenses that are not pinned, last used at the end

    def holds(self, lenses: Iterable[int]) -> bool:
        """Return whether all these lenses have slots."""
        return all(lens in self.of for lens in lenses)

    def touch(self, lenses: Iterable[int]) -> None:
        """Mark these lenses as used now."""
        for lens in lenses:
            if lens in self._recent:
                self._recent.move_to_end(lens)

    def place(self, lenses: Sequence[int], locked: Collection[int]) -> dict[int, int] | None:
        """Return slots for those of the lenses that have none, or None if only locked lenses could be evicted."""
        missing = [lens for lens in lenses if lens not in self.of]
        excess = len(missing) - len(self._free)
        if excess > 0:
            stay = {*lenses, *locked}
            evicted = list(islice((lens for lens in self._recent if lens not in stay), excess))
            if len(evicted) < excess:
                return None
            self.evict(evicted)
        found = dict(zip(missing, self._take(len(missing)), strict=True))
        self.of.update(found)
        self._recent.update(dict.fromkeys(missing))
        self.touch(lenses)
        self.changes += 1
        return found

    def evict(self, lenses: Iterable[int]) -> None:
        """Free the slots of lenses that are not pinned."""
        self.changes += 1
        for lens in lenses:
            del self._recent[lens]
            self._free.add(self.of.pop(lens))

    def _take(self, count: int) -> list[int]:
        """Take free slots, consecutive ones if possible, so that a group is evaluated in one piece."""
        free = sorted(self._free)
        starts = range(len(free) - count + 1)
        first = next((i for i in starts if count and free[i + count - 1] - free[i] == count - 1), 0)
        chosen = free[first : first + count]
        self._free.difference_update(chosen)
        return chosen
