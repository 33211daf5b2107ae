"""Turn the output of a done job into what the engine is told: tokens, verdicts, faults by row.

The logits are read where the device wrote them, and only because the completion said OUTPUT_VALID
(E3, D2). Nothing of a row depends on another row (I7, I12).
"""

import hashlib
from collections.abc import Sequence

import attrs
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


@attrs.frozen(eq=False)
class Prepared:
    """What reading the output of one job needs beside the output; of nobody else's job.

    ``rows`` are those of the batch by place. Why: it is known when the job is submitted, and can be
    made while the device computes.
    """

    effect: SubmitJob
    rows: tuple[SubmitRow | None, ...]
    sampling: SamplingArrays
    tokens: NDArray[np.int32]
    status: NDArray[np.int8]
    logprobs: Logprobs | None


def prepare(effect: SubmitJob) -> Prepared:
    """Write down what is asked of the rows of a job. Raises: ValueError for a row without seed."""
    rows = effect.batch_rows
    count = len(rows)
    return Prepared(
        effect,
        rows,
        _wanted(rows),
        np.empty(count, np.int32),
        np.empty(count, np.int8),
        _room_for_logprobs(effect.rows, count),
    )


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

    def read(
        self,
        effect: SubmitJob,
        model: LoadedModel,
        buffer: Buffer,
        prepared: Prepared | None = None,
    ) -> tuple[RowResult, ...]:
        """Sample or judge every row of a job whose output is valid, in the order of the job.

        What was ``prepared`` for another job is not used.
        Raises: InternalError if the submodel has no logits of the documented form; ValueError for a
        row without seed.
        """
        if prepared is None or prepared.effect is not effect:
            prepared = prepare(effect)
        logits = read_logits(buffer, model.vocabulary)[: len(prepared.rows)]
        sampling = self._sampling.get(model.vocabulary)
        if sampling is None:
            sampling = SamplingThreads(model.vocabulary, self._samplers)
            self._sampling[model.vocabulary] = sampling
        sampling.sample(
            logits, prepared.sampling, prepared.tokens, prepared.status, prepared.logprobs
        )
        if effect.origin == "request":
            return _request_results(model, buffer, prepared)
        return self._trial_results(model, buffer, prepared, logits)

    def _trial_results(
        self, model: LoadedModel, buffer: Buffer, prepared: Prepared, logits: NDArray[np.uint16]
    ) -> tuple[RowResult, ...]:
        """Return what golden, canary and warm-up rows gave; their tokens are nobody's text."""
        origin = prepared.effect.origin
        digests = _digests(buffer, len(prepared.rows))
        results = []
        for index, row in enumerate(prepared.rows):
            if row is None:
                continue
            fault = _fault_of(int(prepared.status[index]))
            verdict = ""
            if origin in ("golden", "canary") and not fault:
                verdict = _judge(model, row, logits[index])
                if self._exact and verdict == EQUAL:
                    verdict = _hold_bits(origin, model, row, logits[index])
            results.append(
                RowResult(
                    token=int(prepared.tokens[index]) if row.sampling is not None else NO_TOKEN,
                    fault=fault,
                    verdict=verdict,
                    kv_digest=digests[index],
                    logprobs=_logprobs_of(prepared, index),
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
    known = buffer.logits
    if known is not None and known.shape[1] == vocabulary:
        return known
    logits = buffer.output("logits")
    rows = buffer.submodel.batch_max
    if logits is None or logits.dtype != np.uint16 or logits.size != rows * vocabulary:
        raise InternalError(
            f"submodel {buffer.submodel.name} has no logits tensor of one bf16 row of {vocabulary}"
            f" for each of its {rows} rows"
        )
    buffer.logits = logits.reshape(rows, vocabulary).view(np.uint16)
    return buffer.logits


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


def _request_results(
    model: LoadedModel, buffer: Buffer, prepared: Prepared
) -> tuple[RowResult, ...]:
    """Return what the rows of requests gave, and look for stop strings where there are any."""
    push = model.text.push
    digests = _digests(buffer, len(prepared.rows))
    tokens, status = prepared.tokens.tolist(), prepared.status.tolist()
    return tuple(
        [
            RowResult(
                token=token,
                stop_hit=row.searched
                and token != NO_TOKEN
                and push(row.owner, row.generated, token),
                fault=_fault_of(code) if code else "",
                kv_digest=digest,
                logprobs=_logprobs_of(prepared, index),
            )
            for index, (row, token, code, digest) in enumerate(
                zip(prepared.rows, tokens, status, digests, strict=True)
            )
            if row is not None
        ]
    )


def _digests(buffer: Buffer, count: int) -> Sequence[int | None]:
    """Return the device's digest of each row's KV, None for each where it tells none."""
    digests = buffer.output("kv_digest")
    return (None,) * count if digests is None else digests.reshape(-1)[:count].tolist()


def _logprobs_of(prepared: Prepared, index: int) -> tuple[tuple[int, float], ...]:
    return () if prepared.logprobs is None else prepared.logprobs.of_row(index)


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
