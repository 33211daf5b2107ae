"""The order in which waiting requests are served: weighted fair among tenants, by priority, ageing.

Theory of operation. A class of waiting requests is a heap of keys. A request's start tag is the
service, in tokens, at which its turn would come if every tenant got its weight's share all the
time: the later of the class's virtual time and the end of its tenant's previous request; its own
cost over its tenant's weight moves that end. The virtual time is the tag of the last request
served. The key is the tag plus ``priority`` times a fixed step, so a lower number goes first and
yet waits no longer than the service its lead is worth: tags only rise, so whoever waits is passed
by a bounded number of tokens of others' work (R5.4, E13). With one tenant and one priority the
order is that of arrival (G9).

A request that goes on after a fault stands before all others: its turn had come once.

A request that ended is left in the heap and skipped, so that a cancel costs nothing.
"""

import heapq
from collections.abc import Callable, Iterator

import attrs

UNIT = 1 << 10
"""Parts of a token that tags are counted in, so that shares of small weights stay exact enough."""

FIRST_KEY = -(1 << 100)
"""Before every key that a tag and a priority make: of those whose turn had come before a fault."""

TENANTS_KEPT = 256


@attrs.define
class FairQueue:
    """The waiting requests of one class: (key, request number) as a heap, and its virtual time."""

    entries: list[tuple[int, int]] = attrs.Factory(list)
    virtual: int = 0
    ends: dict[str, int] = attrs.Factory(dict)
    """Per tenant the tag at which its last request's share ends."""

    def tag(self, tenant: str, *, cost_tokens: int, weight: int) -> int:
        """Return the start tag of a new request of a tenant, and move the tenant's end."""
        if len(self.ends) > TENANTS_KEPT:
            self.ends = {name: end for name, end in self.ends.items() if end > self.virtual}
        start = max(self.virtual, self.ends.get(tenant, 0))
        self.ends[tenant] = start + cost_tokens * UNIT // weight
        return start

    def push(self, key: int, number: int) -> None:
        """Let a request wait under its key."""
        heapq.heappush(self.entries, (key, number))

    def discard(self, number: int) -> None:
        """Drop a request wherever it stands."""
        if any(entry[1] == number for entry in self.entries):
            self.entries = [entry for entry in self.entries if entry[1] != number]
            heapq.heapify(self.entries)

    def serve(self, tag: int) -> None:
        """Let the virtual time follow the request that is served."""
        self.virtual = max(self.virtual, tag)

    def in_order(self) -> Iterator[int]:
        """Yield the numbers in the order of their keys, without changing anything.

        The first k cost k log k, whatever the length.
        """
        entries = self.entries
        front = [(entries[0], 0)] if entries else []
        while front:
            (_, number), place = heapq.heappop(front)
            yield number
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(entries):
                    heapq.heappush(front, (entries[child], child))

    def drop_passed(self, waits: Callable[[int], bool]) -> None:
        """Drop from the front what does not wait any more."""
        while self.entries and not waits(self.entries[0][1]):
            heapq.heappop(self.entries)

    def compact(self, waits: Callable[[int], bool], live: int) -> None:
        """Bound the heap by those who wait, whoever leaves behind its front."""
        if len(self.entries) > 2 * live + 64:
            self.entries = [entry for entry in self.entries if waits(entry[1])]
            heapq.heapify(self.entries)
