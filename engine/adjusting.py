"""Take the entries that a request's own parameters change out of a row, and value them exactly.

Theory of operation. Penalties, biases and masks touch a few hundred of a hundred thousand entries,
so the row stays as the device wrote it and no FP32 copy of it is made. The entries that may change
are *touched*: each gets a mark, so that what reads the row skips it, and its own FP32 value. The
largest key of a block is found again only where a touched entry held it. merging.py then puts the
two parts, row and touched entries, in one order.

The value of a touched entry, every operation rounded to FP32, in this order: the logit; plus the
bias; for an id in prompt or output, divided by the repetition penalty if above zero, else times it;
for an id in the output, minus the frequency penalty times its count there, minus the presence
penalty. A masked entry, or one outside the allowed ids if there are any, has no value: it is never
a token whatever its bias is.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from laneway.engine.bf16 import order_key
from laneway.engine.candidates import ID_BITS, order_word
from laneway.engine.jit import inner
from laneway.engine.vectors import BLOCK, WORD

KINDS = 5
PROMPT, OUTPUT, BIAS, ALLOWED, MASKED = range(KINDS)

ABSENT_KEY = np.int16(-32768)
"""Largest key of a block of which nothing is left; below the key of every finite number."""
ABSENT_WORD = np.uint32(0xFFFFFFFF)
"""Order word of a touched entry that has no value; no number has it."""

_HISTORY_FLAGS = np.uint8(1 << PROMPT | 1 << OUTPUT)
_ALLOWED_FLAG = np.uint8(1 << ALLOWED)
_MASKED_FLAG = np.uint8(1 << MASKED)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
_INFINITY = np.float32(np.inf)
_SHIFT = np.uint32(16)


class Touched(NamedTuple):
    """Working memory for the touched entries of one row.

    Shapes: ``marks`` i32[vocabulary] is by token id, 0 or 1 + index; ``bits`` u64[words] has the
    same as one bit for each id. The others are [vocabulary], by index, in the order of touching:
    ids i32, outputs i32 (times in the output), flags u8 (one bit a kind), bias f32, raw i16 (BF16
    bits), numbers f32 (the value), words u32 (order word of the value). ``entries`` u64 are the
    candidates that have a value.
    """

    marks: NDArray[np.int32]
    bits: NDArray[np.uint64]
    ids: NDArray[np.int32]
    outputs: NDArray[np.int32]
    flags: NDArray[np.uint8]
    bias: NDArray[np.float32]
    raw: NDArray[np.int16]
    numbers: NDArray[np.float32]
    words: NDArray[np.uint32]
    entries: NDArray[np.uint64]


def allocate_touched(vocabulary: int) -> Touched:
    """Make the working memory for one vocabulary size."""
    return Touched(
        marks=np.zeros(vocabulary, np.int32),
        bits=np.zeros(-(-vocabulary // WORD), np.uint64),
        ids=np.zeros(vocabulary, np.int32),
        outputs=np.zeros(vocabulary, np.int32),
        flags=np.zeros(vocabulary, np.uint8),
        bias=np.zeros(vocabulary, np.float32),
        raw=np.zeros(vocabulary, np.int16),
        numbers=np.zeros(vocabulary, np.float32),
        words=np.zeros(vocabulary, np.uint32),
        entries=np.zeros(vocabulary, np.uint64),
    )


@inner
def touch(
    row: NDArray[np.int16],
    asked: Any,
    ids: NDArray[np.int32],
    values: NDArray[np.float32],
    touched: Touched,
) -> int:
    """Mark every id that a row names; return how many there are, or -1 for an id out of range.

    Marks are left clear if the answer is -1. ``asked`` is the row's entry in the requests, ``ids``
    and ``values`` hold its lists (sampling_arrays.py).
    """
    count = 0
    for kind in range(KINDS):
        first = asked.spans[kind, 0]
        flag = np.uint8(1 << kind)
        for i in range(first, first + asked.spans[kind, 1]):
            token = ids[i]
            if token < 0 or token >= touched.marks.size:
                clear(touched, count)
                return -1
            index = touched.marks[token] - 1
            if index < 0:
                index = count
                count += 1
                touched.marks[token] = count
                touched.bits[token // WORD] |= bit_of(token)
                touched.ids[index] = token
                touched.raw[index] = row[token]
                touched.outputs[index] = 0
                touched.flags[index] = 0
                touched.bias[index] = 0.0
            touched.flags[index] |= flag
            if kind == OUTPUT:
                touched.outputs[index] += 1
            elif kind == BIAS:
                touched.bias[index] = values[i]
    return count


@inner
def bit_of(token: int) -> np.uint64:
    """Return the bit of a token in its word."""
    return np.uint64(1) << np.uint64(token % WORD)


@inner
def clear(touched: Touched, count: int) -> None:
    """Take back the marks of one row."""
    for index in range(count):
        token = touched.ids[index]
        touched.marks[token] = 0
        touched.bits[token // WORD] = 0


@inner
def adjusted_value(
    bits: np.int16,
    bias: np.float32,
    in_history: bool,
    outputs: int,
    repetition: np.float32,
    frequency: np.float32,
    presence: np.float32,
) -> np.float32:
    """Return the value of one touched entry, as the module docstring orders it."""
    x = np.uint32(np.uint32(np.uint16(bits)) << _SHIFT).view(np.float32)
    x = np.float32(x + bias)
    if in_history and repetition != _ONE:
        x = np.float32(x / repetition) if x > _ZERO else np.float32(x * repetition)
    if outputs > 0:
        x = np.float32(x - np.float32(frequency * np.float32(outputs)))
        x = np.float32(x - presence)
    return np.float32(x + _ZERO)


@inner
def value_touched(asked: Any, touched: Touched, count: int) -> tuple[int, int, int]:
    """Fill words and entries; return how many have a value, how many are +inf, and one of those.

    The first number is -1 if a value is not a number. Entries that are +inf have no candidate.
    """
    restricted = asked.spans[ALLOWED, 1] > 0
    dropped = _MASKED_FLAG | (_ALLOWED_FLAG if restricted else np.uint8(0))
    kept = _ALLOWED_FLAG if restricted else np.uint8(0)
    repetition, frequency, presence = asked.repetition, asked.frequency, asked.presence
    for index in range(count):
        flags = touched.flags[index]
        x = adjusted_value(
            touched.raw[index],
            touched.bias[index],
            (flags & _HISTORY_FLAGS) != 0,
            touched.outputs[index],
            repetition,
            frequency,
            presence,
        )
        touched.numbers[index] = x
        touched.words[index] = order_word(x) if (flags & dropped) == kept else ABSENT_WORD
    left = 0
    infinite = 0
    certain = -1
    for index in range(count):
        word = touched.words[index]
        if word == ABSENT_WORD:
            continue
        x = touched.numbers[index]
        if not abs(x) < _INFINITY:
            touched.words[index] = ABSENT_WORD
            if np.isnan(x):
                return -1, 0, -1
            if x > _ZERO:
                infinite += 1
                certain = touched.ids[index]
            continue
        touched.entries[left] = (np.uint64(word) << ID_BITS) | np.uint64(touched.ids[index])
        left += 1
    return left, infinite, certain


@inner
def hide(
    row: NDArray[np.int16],
    block_max: NDArray[np.int16],
    touched: Touched,
    count: int,
    restricted: bool,
) -> None:
    """Make the block maxima those of the entries that are not touched; none if ``restricted``.

    Why: a block is read again only if a touched entry may have been its largest.
    """
    if restricted:
        block_max[:] = ABSENT_KEY
        return
    for index in range(count):
        block = touched.ids[index] // BLOCK
        if order_key(touched.raw[index]) != block_max[block]:
            continue
        best = ABSENT_KEY
        for i in range(block * BLOCK, min((block + 1) * BLOCK, row.size)):
            if touched.bits[i // WORD] & bit_of(i) == 0:
                best = max(best, order_key(row[i]))
        block_max[block] = best
