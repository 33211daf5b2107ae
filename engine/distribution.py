"""Count integers by bucket, exactly, so that two folds of the same steps are equal to the last bit.

Values are integers in a small unit (nanoseconds, millionths); ``scale`` of them make the unit that
is shown. Sums are therefore exact whatever the order of the observations.
"""

from bisect import bisect_left

import attrs

SECOND_NS = 1_000_000_000
MILLIONTHS = 1_000_000


def decades(first: int, last: int) -> tuple[int, ...]:
    """Return the bounds 1, 2, 5, 10, 20, 50, … times ``first``, up to ``last``."""
    bounds: list[int] = []
    power = first
    while power <= last:
        bounds += [bound for bound in (power, 2 * power, 5 * power) if bound <= last]
        power *= 10
    return tuple(bounds)


LATENCY_BOUNDS_NS = decades(100_000, 500 * SECOND_NS)
STAGE_BOUNDS_NS = decades(10_000, 50 * SECOND_NS)
RATIO_BOUNDS = tuple(MILLIONTHS * eighths // 8 for eighths in range(1, 9))


@attrs.frozen
class Distribution:
    """What a histogram has counted: ``counts[i]`` up to ``bounds[i]``, the last above all bounds.

    Units: bounds and ``total`` (the sum of all values) are in 1/``scale``.
    """

    bounds: tuple[int, ...]
    counts: tuple[int, ...]
    total: int
    scale: int

    @property
    def count(self) -> int:
        """Return how many values were counted."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Return the mean of all values, or None when nothing was counted."""
        return self.total / self.count / self.scale if self.count else None

    def plus(self, other: "Distribution") -> "Distribution":
        """Return what both have counted. Raises: ValueError for other bounds or another scale."""
        if (self.bounds, self.scale) != (other.bounds, other.scale):
            raise ValueError("distributions of different bounds cannot be added")
        counts = tuple(mine + its for mine, its in zip(self.counts, other.counts, strict=True))
        return Distribution(self.bounds, counts, self.total + other.total, self.scale)

    def cumulative(self) -> tuple[tuple[float, int], ...]:
        """Return (upper bound, values up to it) of each bucket; the last bound is infinite."""
        pairs: list[tuple[float, int]] = []
        reached = 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            reached += count
            pairs.append((float("inf") if bound is None else bound / self.scale, reached))
        return tuple(pairs)

    def quantile(self, share: float) -> float | None:
        """Return the value below which ``share`` of all lie, or None when nothing was counted.

        Estimated: values are taken as spread evenly in their bucket; above the last bound it is
        that bound.
        """
        wanted = share * self.count
        if not self.count:
            return None
        lower, before = 0.0, 0
        for upper, reached in self.cumulative():
            if upper == float("inf"):
                break
            if reached >= wanted and reached > before:
                return lower + (upper - lower) * (wanted - before) / (reached - before)
            lower, before = upper, reached
        return lower


@attrs.define
class Histogram:
    """A histogram under observation."""

    bounds: tuple[int, ...]
    scale: int
    counts: list[int] = attrs.field(
        default=attrs.Factory(lambda self: [0] * (len(self.bounds) + 1), takes_self=True)
    )
    total: int = 0

    def observe(self, value: int, times: int = 1) -> None:
        """Count one value so many times. Units: 1/``scale``."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def seen(self) -> bool:
        """Whether anything was counted."""
        return any(self.counts)

    def freeze(self) -> Distribution:
        """Return what was counted so far."""
        return Distribution(self.bounds, tuple(self.counts), self.total, self.scale)


def latencies() -> Histogram:
    """Return an empty histogram for what a client waits for. Units: ns, shown in seconds."""
    return Histogram(LATENCY_BOUNDS_NS, SECOND_NS)


def stages() -> Histogram:
    """Return an empty histogram for the stages of a job. Units: ns, shown in seconds."""
    return Histogram(STAGE_BOUNDS_NS, SECOND_NS)


def ratios() -> Histogram:
    """Return an empty histogram for shares of a whole. Units: millionths, shown as 0..1."""
    return Histogram(RATIO_BOUNDS, MILLIONTHS)
