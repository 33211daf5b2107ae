"""Histograms by how many tokens they are about: a long prompt does not hide among short ones."""

from bisect import bisect_left
from collections import defaultdict

import attrs

from laneway.engine.distribution import Distribution, Histogram, latencies

BUCKET_BOUNDS = (32, 128, 512, 2048, 8192)
"""Tokens up to which each bucket but the last goes."""
BUCKETS = (*(str(bound) for bound in BUCKET_BOUNDS), "more")


def bucket_of(tokens: int) -> int:
    """Return the place of the bucket that so many tokens fall into."""
    return bisect_left(BUCKET_BOUNDS, tokens)


@attrs.define
class Bucketed:
    """One latency by bucket; buckets that saw nothing do not exist, but there is always one."""

    of: defaultdict[int, Histogram] = attrs.Factory(lambda: defaultdict(latencies))

    def observe(self, bucket: int, value: int, times: int = 1) -> None:
        """Count one value so many times. Units: ns."""
        self.of[bucket].observe(value, times)

    def freeze(self) -> tuple[tuple[str, Distribution], ...]:
        """Return what was counted so far, by the bucket's name, fewest tokens first."""
        held = self.of or {0: latencies()}
        return tuple((BUCKETS[bucket], held[bucket].freeze()) for bucket in sorted(held))
