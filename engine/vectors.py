"""The few loops of the sampler that are written as vector code.

Theory of operation. numba's loops over arrays become vector code only in simple cases, and three
things that the sampler lives on are none of them:

- *block_extrema*. A scan of cold rows is bound by memory only if it does next to nothing for each
  number and keeps the memory busy. So a block is loaded once; its signed and its unsigned maximum
  are taken from the same registers, and the unsigned one stays in a vector until the end of the
  loop; and four parts of the row are read side by side, each prefetched a little ahead, because one
  sequence of addresses gets about half of a core's bandwidth.
- *reach_mask*, *equal_mask*. Which of 64 numbers pass a test, as the bits of one word: most words
  are zero, and the others are walked bit by bit.
- *four_at*. Four numbers with one load, wherever they begin.

What is built is generic LLVM code without a processor's name in it. Nothing is checked: a caller
gives indices that are inside.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

BLOCK = 128
STREAMS = 4
WORD = 64
"""Numbers of a mask."""

_LANES = 16
_AHEAD = 256
"""Numbers that a stream is prefetched ahead; at its end, what lies behind it."""
_LINE = 32
_INT8, _INT16, _INT32, _INT64 = (ir.IntType(width) for width in (8, 16, 32, 64))
_VECTOR = ir.VectorType(_INT16, _LANES)
_WIDE = ir.VectorType(_INT16, WORD)

_TOOLS: Any = cgutils
Built = tuple[Any, Callable[..., Any]]


def _vector_code(function: Callable[..., Built]) -> Callable[..., Any]:
    """Let compiled functions call what a function here builds, without its typing context."""
    return cast(Callable[..., Any], intrinsic(function))


@_vector_code
def block_extrema(typing_context: Any, row: Any, count: Any, block_max: Any) -> Built:
    """Fill the signed maxima of the first STREAMS * count blocks; return their unsigned maximum.

    Call: ``block_extrema(row, count, block_max)``.
    Shapes: row i16[at least STREAMS * count * BLOCK], block_max i16[at least STREAMS * count].
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        numbers = _address(context, builder, signature.args[0], arguments[0])
        filled = _address(context, builder, signature.args[2], arguments[2])
        highest = _TOOLS.alloca_once_value(builder, ir.Constant(_VECTOR, [0] * _LANES))
        with _TOOLS.for_range(builder, arguments[1], intp=_INT64) as loop:
            most = builder.load(highest)
            for stream in range(STREAMS):
                first = builder.mul(arguments[1], ir.Constant(_INT64, stream))
                block = builder.add(first, loop.index)
                begin = builder.gep(numbers, [builder.mul(block, ir.Constant(_INT64, BLOCK))])
                _prefetch_block(builder, begin)
                vectors = _load_block(builder, begin)
                most = _call(builder, "llvm.umax", most, _largest(builder, "llvm.umax", vectors))
                best = _largest(builder, "llvm.smax", vectors)
                best = _call(builder, "llvm.vector.reduce.smax", best, result=_INT16)
                builder.store(best, builder.gep(filled, [block]))
            builder.store(most, highest)
        most = builder.load(highest)
        return _call(builder, "llvm.vector.reduce.umax", most, result=_INT16)

    return types.uint16(row, types.int64, block_max), build


@_vector_code
def reach_mask(typing_context: Any, row: Any, begin: Any, key: Any) -> Built:
    """Return which of 64 numbers have an order key (bf16.py) of at least ``key``, lowest bit first.

    -0.0 has key -1 here. Call: ``reach_mask(row, begin, key)``. Shapes: row i16[begin + WORD].
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        bits = _load_word(context, builder, signature, arguments)
        signs = builder.ashr(bits, _everywhere(builder, ir.Constant(_INT16, 15)))
        flips = builder.and_(signs, _everywhere(builder, ir.Constant(_INT16, 0x7FFF)))
        keys = builder.xor(bits, flips)
        reached = builder.icmp_signed(">=", keys, _everywhere(builder, arguments[2]))
        return _as_word(builder, reached)

    return types.uint64(row, types.int64, types.int16), build


@_vector_code
def equal_mask(typing_context: Any, row: Any, begin: Any, bits: Any) -> Built:
    """Return which of 64 numbers have given bits, lowest bit first.

    Call: ``equal_mask(row, begin, bits)``. Shapes: row i16[begin + WORD].
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        found = _load_word(context, builder, signature, arguments)
        equal = builder.icmp_signed("==", found, _everywhere(builder, arguments[2]))
        return _as_word(builder, equal)

    return types.uint64(row, types.int64, types.int16), build


@_vector_code
def four_at(typing_context: Any, row: Any, begin: Any) -> Built:
    """Return four numbers of a row as one word, the first in its lowest bits.

    Call: ``four_at(row, begin)``. Shapes: row i16[begin + 4].
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        numbers = _address(context, builder, signature.args[0], arguments[0])
        place = builder.gep(numbers, [arguments[1]])
        return builder.load(builder.bitcast(place, _INT64.as_pointer()), align=2)

    return types.uint64(row, types.int64), build


@_vector_code
def count_bits(typing_context: Any, mask: Any) -> Built:
    """Return how many bits of a word are set. Call: ``count_bits(mask)``."""

    def build(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), build


@_vector_code
def lowest_bit(typing_context: Any, mask: Any) -> Built:
    """Return the place of the lowest set bit of a word, 64 if there is none.

    Call: ``lowest_bit(mask)``.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), build


def _address(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """Return where the numbers of an array begin."""
    return context.make_array(array_type)(context, builder, array).data


def _prefetch_block(builder: Any, begin: Any) -> None:
    """Ask for the block that a stream comes to a little later."""
    for line in range(_AHEAD, _AHEAD + BLOCK, _LINE):
        ahead = builder.gep(begin, [ir.Constant(_INT64, line)])
        address = builder.bitcast(ahead, _INT8.as_pointer())
        function = ir.FunctionType(ir.VoidType(), [address.type, _INT32, _INT32, _INT32])
        prefetch = _TOOLS.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
        to_read, near, data = (ir.Constant(_INT32, option) for option in (0, 3, 1))
        builder.call(prefetch, [address, to_read, near, data])


def _load_block(builder: Any, begin: Any) -> list[Any]:
    """Load a block as vectors; its address is that of a 16-bit number, no more."""
    vectors = []
    for offset in range(0, BLOCK, _LANES):
        place = builder.gep(begin, [ir.Constant(_INT64, offset)])
        vectors.append(builder.load(builder.bitcast(place, _VECTOR.as_pointer()), align=2))
    return vectors


def _load_word(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
    """Load the 64 numbers of a row (first argument) from a place (second) on."""
    numbers = _address(context, builder, signature.args[0], arguments[0])
    place = builder.gep(numbers, [arguments[1]])
    return builder.load(builder.bitcast(place, _WIDE.as_pointer()), align=2)


def _as_word(builder: Any, tests: Any) -> Any:
    """Return the outcomes of 64 tests as the bits of one word.

    Why the empty instruction: a word that LLVM still knows as tests may be carried as 64 numbers
    to where it is used, and put together there one by one.
    """
    word = builder.bitcast(tests, _INT64)
    kept = ir.InlineAsm(ir.FunctionType(_INT64, [_INT64]), "", "=r,0")
    return builder.call(kept, [word])


def _everywhere(builder: Any, number: Any) -> Any:
    """Return a vector of 64 times one 16-bit number."""
    nothing = ir.Constant(_WIDE, ir.Undefined)
    one = builder.insert_element(nothing, number, ir.Constant(_INT32, 0))
    places = ir.Constant(ir.VectorType(_INT32, WORD), [0] * WORD)
    return builder.shuffle_vector(one, nothing, places)


def _largest(builder: Any, operation: str, vectors: Sequence[Any]) -> Any:
    """Join vectors two by two until one is left."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [_call(builder, operation, first, second) for first, second in pairs]
    return vectors[0]


def _call(builder: Any, operation: str, *vectors: Any, result: Any = _VECTOR) -> Any:
    """Call an LLVM intrinsic on vectors of 16 numbers."""
    function = ir.FunctionType(result, [_VECTOR] * len(vectors))
    name = f"{operation}.v{_LANES}i16"
    return builder.call(_TOOLS.get_or_insert_function(builder.module, function, name), vectors)
