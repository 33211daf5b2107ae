"""What the device computed for every token: a hash of the logits, before anything is sampled."""

import hashlib
from typing import Any

import pytest

from laneway.adapters.buffers import Buffer
from laneway.adapters.loaded import LoadedModel
from laneway.adapters.results import Results, read_logits
from laneway.engine.effects import SubmitJob


class LogitsLog:
    """Keeps, for each request, the hash of the logits behind each of its positions.

    ``rows`` counts the rows of each job of a decode, so that a test can tell that batches were run;
    ``places`` are their rows of the batch where those are fixed to lanes.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.of: dict[int, dict[int, str]] = {}
        self.rows: list[int] = []
        self.places: list[tuple[int, ...]] = []
        real = Results.read

        def read(
            results: Results, effect: SubmitJob, model: LoadedModel, buffer: Buffer, *given: Any
        ) -> Any:
            if effect.origin == "request":
                self._take(effect, model, buffer)
            return real(results, effect, model, buffer, *given)

        patch.setattr(Results, "read", read)

    def _take(self, effect: SubmitJob, model: LoadedModel, buffer: Buffer) -> None:
        logits = read_logits(buffer, model.vocabulary)
        if effect.task == "decode":
            self.rows.append(len(effect.rows))
            self.places.append(effect.places)
        for index, row in enumerate(effect.batch_rows):
            if row is not None and row.sampling is not None:
                position = row.start + len(row.tokens)
                digest = hashlib.sha256(logits[index].tobytes()).hexdigest()
                self.of.setdefault(row.owner, {})[position] = digest
