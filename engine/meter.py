"""Feed steps to the metrics so that a number that cannot be measured never hurts serving."""

import attrs

from laneway.engine.families import picture
from laneway.engine.metrics import Metrics
from laneway.engine.picture import MetricsPicture
from laneway.engine.ports import Step


@attrs.define
class Meter:
    """Metrics, and how many steps could not be measured."""

    metrics: Metrics = attrs.Factory(Metrics)
    failures: int = 0

    def take(self, step: Step) -> Exception | None:
        """Observe one step; return what went wrong instead of raising it."""
        try:
            self.metrics.observe(step)
        except Exception as failure:
            self.failures += 1
            return failure
        return None

    def picture(self) -> MetricsPicture:
        """Return an immutable picture of all numbers."""
        return picture(self.metrics, failures=self.failures)
