"""Turn the output of a done job into what the engine is told: tokens, verdicts, faults by row.

The logits are read where the device wrote them, and only because the completion said OUTPUT_VALID
(E3, D2). Nothing of a row depends on another row (I7, I12).
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from laneway.adapters.buffers import Buffer
from laneway.adapters.loaded import LoadedModel
from laneway.adapters.sampling_threads import SamplingThreads
from laneway.adapters.trials import EQUAL, judge_row
from laneway.engine.bf16 import ROW_OK, ROW_PARAMETERS
from laneway.engine.effects import SubmitJob, SubmitRow
from laneway.engine.errors import InternalError
from laneway.engine.inputs import NO_TOKEN, RowResult
from laneway.engine.logprobs import Logprobs, allocate_logprobs
from laneway.engine.sampling_arrays import SamplingArrays


class Results:
    """Postprocessing for one caller at a time, with working memory by vocabulary size.

    ``exact``: the device gives the same bits for the same tokens wherever they run, so a canary is
    also held against the bits of the golden run of its load (E25). ``samplers``: threads that share
    the rows of a job; tokens are the same for any number (K5).
    """

    def __init__(self, *, exact: bool = False, samplers: int = 1) -> None:
        self._exact = exact
        self._samplers = samplers
        self._sampling: dict[int, SamplingThreads] = {}

    def read(self, effect: SubmitJob, model: LoadedModel, buffer: Buffer) -> tuple[RowResult, ...]:
        """Sample or judge every row of a job whose output is valid, in the order of the job.

        Raises: InternalError if the submodel has no logits of the documented form.
        """
        rows = effect.batch_rows
        count = len(rows)
        logits = read_logits(buffer, model.vocabulary)[:count]
        tokens, status = np.empty(count, np.int32), np.empty(count, np.int8)
        sampling = self._sampling.get(model.vocabulary)
        if sampling is None:
            sampling = SamplingThreads(model.vocabulary, self._samplers)
            self._sampling[model.vocabulary] = sampling
        logprobs = _room_for_logprobs(effect.rows, count)
        sampling.sample(logits, _wanted(rows), tokens, status, logprobs)
        digests = buffer.output("kv_digest")
        results = []
        for index, row in enumerate(rows):
            if row is None:
                continue
            fault = _fault_of(int(status[index]))
            token = int(tokens[index])
            verdict = ""
            if effect.origin in ("golden", "canary") and not fault:
                verdict = _judge(model, row, logits[index])
                if self._exact and verdict == EQUAL:
                    verdict = _hold_bits(effect.origin, model, row, logits[index])
            results.append(
                RowResult(
                    token=token if row.sampling is not None else NO_TOKEN,
                    stop_hit=_push_text(model, effect, row, token),
                    fault=fault,
                    verdict=verdict,
                    kv_digest=None if digests is None else int(digests.reshape(-1)[index]),
                    logprobs=() if logprobs is None else logprobs.of_row(index),
                )
            )
        return tuple(results)

    def close(self) -> None:
        """End the threads; idempotent."""
        for sampling in self._sampling.values():
            sampling.close()
        self._sampling.clear()


def read_logits(buffer: Buffer, vocabulary: int) -> NDArray[np.uint16]:
    """Return the BF16 logits of a buffer as they lie in its arena.

    Shapes: [rows, vocabulary].
    Raises: InternalError if the submodel has no logits of the documented form.
    """
    logits = buffer.output("logits")
    rows = buffer.submodel.batch_max
    if logits is None or logits.dtype != np.uint16 or logits.size != rows * vocabulary:
        raise InternalError(
            f"submodel {buffer.submodel.name} has no logits tensor of one bf16 row of {vocabulary}"
            f" for each of its {rows} rows"
        )
    return logits.reshape(rows, vocabulary).view(np.uint16)


def _wanted(rows: tuple[SubmitRow | None, ...]) -> SamplingArrays:
    arrays = SamplingArrays.allocate(len(rows))
    for index, row in enumerate(rows):
        if row is None:
            continue  # an inactive row's numbers are nobody's, and stay unread
        if row.sampling is None:
            arrays.want_scan(index)
        else:
            arrays.want_token(
                index,
                row.sampling,
                position=row.start + len(row.tokens),
                prompt=row.prompt,
                output=row.output,
                masked=row.masked,
                logprobs=row.logprobs,
            )
    return arrays


def _room_for_logprobs(rows: tuple[SubmitRow, ...], count: int) -> Logprobs | None:
    """Return room for log-probabilities of ``count`` rows, or None where no row asks for any."""
    return None if all(row.logprobs is None for row in rows) else allocate_logprobs(count)


def _fault_of(status: int) -> str:
    if status == ROW_OK:
        return ""
    return "parameters" if status == ROW_PARAMETERS else "numeric"


def _judge(model: LoadedModel, row: SubmitRow, bits: NDArray[np.uint16]) -> str:
    """Return the verdict on a golden row, or nothing where golden runs are not compared."""
    run = model.trials[row.owner].golden
    if run is None:
        return ""
    return judge_row(run, row.start + len(row.tokens) - 1, bits)


def _hold_bits(origin: str, model: LoadedModel, row: SubmitRow, bits: NDArray[np.uint16]) -> str:
    """Keep the bits of a golden row at the load; hold those of a canary against them."""
    key = (row.owner, row.start + len(row.tokens) - 1)
    digest = hashlib.blake2b(bits.tobytes(), digest_size=16).digest()
    if origin == "golden":
        model.golden_bits[key] = digest
    elif model.golden_bits.get(key, digest) != digest:
        return "within the tolerance, but its bits are not those of the golden run at the load"
    return EQUAL


def _push_text(model: LoadedModel, effect: SubmitJob, row: SubmitRow, token: int) -> bool:
    """Hand a sampled token of a request to its text; tell whether a stop string is complete."""
    if effect.origin != "request" or token == NO_TOKEN:
        return False
    return model.text.push(row.owner, row.generated, token)
