"""Get a buffer ready for the job that it will most likely have, while the device computes.

Theory of operation. While like decode jobs follow one another, all of the next one is known but its
tokens. ``foresee`` translates its KV operations, writes its positions and lengths into the buffer,
which is free, and says in the buffer's form what its submit will say. When the job comes it is held
against what was foreseen; only if all of it is the same do its tokens alone have to be written.
Anything else, and anything that happened to buffer or bank meanwhile, and it is filled in anew. A
buffer that was made ready for a job that does not come is wiped.

Source: E3 (filled before the submit), E4 (nothing of anybody in a free buffer).
"""

from collections.abc import Mapping

import attrs

from laneway.adapters.buffers import Buffer, csr_values
from laneway.adapters.loaded import DeviceOperations, Generation, LoadedModel
from laneway.engine.effects import SubmitJob


@attrs.frozen(eq=False, kw_only=True)
class Foreseen:
    """A job that a buffer was made ready for, and what it was worked out from.

    ``operations``: what `LoadedModel.device_operations` gave with the lane tags ``tags``.
    ``fillings``: those of the buffer, its own among them.
    """

    job: SubmitJob
    generation: Generation
    buffer: Buffer
    fillings: int
    tags: Mapping[int, int]
    operations: DeviceOperations
    outline: list[tuple[int, int, int]]

    @property
    def is_untouched(self) -> bool:
        """Whether the buffer is free and as it was made ready."""
        buffer = self.buffer
        return buffer.is_free and bool(buffer.views) and buffer.fillings == self.fillings

    def is_of(self, job: SubmitJob, model: LoadedModel) -> bool:
        """Return whether a job is the one foreseen but for its tokens, and nothing has changed."""
        mine = self.job
        return (
            model.current is self.generation
            and model.lane_tags is self.tags
            and model.buffers.get(job.buffer) is self.buffer
            and self.is_untouched
            and (job.job, job.epoch, job.generation) == (mine.job, mine.epoch, mine.generation)
            and not job.places
            and job.operations == mine.operations
            and _outline(job) == self.outline
        )


def foresee(model: LoadedModel, generation: Generation, buffer: Buffer, job: SubmitJob) -> Foreseen:
    """Make a free buffer ready for a job of which all but the tokens is right.

    Raises: ValueError if its rows do not fit; InternalError if the buffer is held or tainted, or a
    lane is not the model's.
    """
    tags = model.lane_tags
    operations = model.device_operations(job.operations)
    write(model, generation, buffer, job, operations[1])
    return Foreseen(
        job=job,
        generation=generation,
        buffer=buffer,
        fillings=buffer.fillings,
        tags=tags,
        operations=operations,
        outline=_outline(job),
    )


def put_tokens(model: LoadedModel, buffer: Buffer, job: SubmitJob) -> bool:
    """Write the tokens of a job that was foreseen; return False, and write none, if one is bad."""
    return buffer.put_tokens([row.tokens[0] for row in job.rows], vocabulary=model.vocabulary)


def write(
    model: LoadedModel,
    generation: Generation,
    buffer: Buffer,
    job: SubmitJob,
    tags: Mapping[int, int],
) -> None:
    """Write a job into its buffer and the buffer's form; ``tags``: of the lanes at the submit.

    Raises: as ``Buffer.fill``; InternalError for a lane that is not the model's.
    """
    batch = job.batch_rows
    buffer.fill(batch, vocabulary=model.vocabulary, positions_max=model.context_tokens)
    buffer.form.fill(
        model.device_rows(batch, tags),
        csr_values(buffer.submodel, batch),
        bank=model.bank,
        generation=generation.device_generation,
        epoch=generation.device_epoch,
        job=job.job,
    )


def _outline(job: SubmitJob) -> list[tuple[int, int, int]]:
    """Return lane, first position and number of tokens of each row."""
    return [(row.lane, row.start, len(row.tokens)) for row in job.rows]
