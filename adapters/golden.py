"""Golden runs: fixed prompts with the tokens and float32 logits that a right device gives.

The file is a `.npz` as `models/README.md` describes. It is read here without pickle and without
trusting any size in it: every array must be one of the documented ones, with the shape that the
model's shape and the run's length give.

Source: E25, R10.2.
"""

import io
import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import BinaryIO

import attrs
import numpy as np
from numpy.typing import NDArray

from laneway.adapters.manifest import BYTES_MAX, GOLDEN_NAME, Shape
from laneway.adapters.rooted import Root
from laneway.engine.errors import ModelError

_MARGIN_TOLERANCE = 1e-4

_RUNS_MAX = 64
# What zipfile and numpy raise for damaged input; RuntimeError is for encrypted members.
_UNPACKING_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    struct.error,
)
_ARRAY_NAME = re.compile(
    r"(prompt|greedy|logits|margin|route_idx|route_w|route_margin)_([0-9]{1,2})"
    r"|([kv])_([0-9]{1,2})_l([0-9]{1,7})"
)


@attrs.frozen(eq=False)
class GoldenRun:
    """One prompt, its greedy continuation and what every row of it must give.

    Shapes: logits [rows, vocab]; margin [rows], top-1 minus top-2; keys and values by layer (first
    and last), each [kv_heads, rows, head_dim]; for a mixture of experts route_experts and
    route_weights [layers, rows, k] and route_margin [layers, rows]. Row r is what follows position
    r of prompt + greedy; rows = prompt + greedy - 1.
    """

    prompt: tuple[int, ...]
    greedy: tuple[int, ...]
    logits: NDArray[np.float32]
    margin: NDArray[np.float32]
    keys: Mapping[int, NDArray[np.float32]]
    values: Mapping[int, NDArray[np.float32]]
    route_experts: NDArray[np.int32] | None
    route_weights: NDArray[np.float32] | None
    route_margin: NDArray[np.float32] | None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids at positions 0 to rows - 1: what a device is fed."""
        return (self.prompt + self.greedy)[:-1]

    @property
    def row_count(self) -> int:
        """How many rows of logits the run has."""
        return len(self.prompt) + len(self.greedy) - 1


@attrs.frozen
class Golden:
    """All golden runs of one model."""

    runs: tuple[GoldenRun, ...]

    @property
    def positions_max(self) -> int:
        """The longest run's rows: the context that a device needs for it."""
        return max(run.row_count for run in self.runs)


def load_golden(root: Root, shape: Shape, *, context: int | None = None) -> Golden:
    """Read and check the golden runs of a model folder.

    Raises: ModelError naming the array that is missing, unknown, misshapen or contradicts another.
    """
    path = root.folder / GOLDEN_NAME
    with root.open(GOLDEN_NAME, bytes_max=BYTES_MAX[GOLDEN_NAME]) as file:
        arrays = _read_arrays(file, path)
    indices = sorted({_run_index(name, path) for name in arrays})
    if not indices or indices != list(range(len(indices))) or len(indices) > _RUNS_MAX:
        raise ModelError(f"{path}: its runs must be numbered 0 to at most {_RUNS_MAX - 1}")
    runs = tuple(_take_run(arrays, index, shape, path) for index in indices)
    if arrays:
        raise ModelError(f"{path}: unknown array {sorted(arrays)[0]} for this model")
    golden = Golden(runs)
    if context is not None and golden.positions_max > context:
        raise ModelError(
            f"{path}: a run has {golden.positions_max} positions, the context is {context}"
        )
    return golden


def _read_arrays(file: BinaryIO, path: object) -> dict[str, NDArray[np.generic]]:
    arrays: dict[str, NDArray[np.generic]] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > BYTES_MAX[GOLDEN_NAME]:
                raise ModelError(f"{path}: unpacks to more than {BYTES_MAX[GOLDEN_NAME]} bytes")
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in arrays:
                    raise ModelError(f"{path}: has the array {name} twice")
                arrays[name] = _parse_array(archive.read(member))
    except _UNPACKING_ERRORS as error:
        raise ModelError(f"{path}: damaged, or no .npz file: {error}") from error
    return arrays


def _parse_array(raw: bytes) -> NDArray[np.generic]:
    """Parse one .npy without letting its header ask for more memory than it brings.

    Raises: ValueError if the header and the bytes disagree, or the values are no numbers.
    """
    stream = io.BytesIO(raw)
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        dims, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        dims, fortran_order, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise ValueError(f".npy version {version}")
    if dtype.kind not in "iuf":
        raise ValueError(f"values of type {dtype}")
    count = 1
    for length in dims:
        count *= length
    if min(dims, default=0) < 0 or count * dtype.itemsize != len(raw) - stream.tell():
        raise ValueError(f"an array of shape {dims} has {len(raw) - stream.tell()} bytes")
    flat = np.frombuffer(raw, dtype=dtype, offset=stream.tell())
    return flat.reshape(dims, order="F" if fortran_order else "C")


def _run_index(name: str, path: object) -> int:
    match = _ARRAY_NAME.fullmatch(name)
    if match is None:
        raise ModelError(f"{path}: unknown array {name!r}")
    return int(match[2] or match[4])


def _take_run(
    arrays: dict[str, NDArray[np.generic]], index: int, shape: Shape, path: object
) -> GoldenRun:
    prompt = _take_ids(arrays, f"prompt_{index}", shape, path)
    greedy = _take_ids(arrays, f"greedy_{index}", shape, path)
    rows = len(prompt) + len(greedy) - 1
    layers = sorted({0, shape.layers - 1})
    kv_dims = (shape.kv_heads, rows, shape.head_dim)
    route_dims = (shape.layers, rows, shape.experts_per_token)
    moe = shape.experts > 0
    run = GoldenRun(
        prompt=prompt,
        greedy=greedy,
        logits=_take_floats(arrays, f"logits_{index}", (rows, shape.vocab), path),
        margin=_take_floats(arrays, f"margin_{index}", (rows,), path),
        keys={n: _take_floats(arrays, f"k_{index}_l{n}", kv_dims, path) for n in layers},
        values={n: _take_floats(arrays, f"v_{index}_l{n}", kv_dims, path) for n in layers},
        route_experts=_take_experts(arrays, f"route_idx_{index}", shape, route_dims, path)
        if moe
        else None,
        route_weights=_take_floats(arrays, f"route_w_{index}", route_dims, path) if moe else None,
        route_margin=_take_floats(arrays, f"route_margin_{index}", route_dims[:2], path)
        if moe
        else None,
    )
    _check_agreement(run, index, path)
    return run


def _take(
    arrays: dict[str, NDArray[np.generic]], name: str, kinds: str, path: object
) -> NDArray[np.generic]:
    if name not in arrays:
        raise ModelError(f"{path}: array {name} is missing")
    array = arrays.pop(name)
    if array.dtype.kind not in kinds:
        raise ModelError(f"{path}: array {name} is {array.dtype}")
    return array


def _take_ids(
    arrays: dict[str, NDArray[np.generic]], name: str, shape: Shape, path: object
) -> tuple[int, ...]:
    array = _take(arrays, name, "iu", path)
    if array.ndim != 1 or array.size == 0:
        raise ModelError(f"{path}: array {name} is {array.shape}; a list of token ids is wanted")
    ids = tuple(int(token) for token in array.tolist())
    if not 0 <= min(ids) <= max(ids) < shape.vocab:
        raise ModelError(f"{path}: array {name} has ids outside the vocabulary {shape.vocab}")
    return ids


def _take_floats(
    arrays: dict[str, NDArray[np.generic]], name: str, dims: tuple[int, ...], path: object
) -> NDArray[np.float32]:
    array = _take(arrays, name, "f", path)
    if array.shape != dims or array.dtype != np.float32:
        raise ModelError(f"{path}: array {name} is {array.dtype} {array.shape}, not float32 {dims}")
    floats = array.astype(np.float32)
    if not bool(np.isfinite(floats).all()):
        raise ModelError(f"{path}: array {name} holds values that are not finite")
    floats.flags.writeable = False
    return floats


def _take_experts(
    arrays: dict[str, NDArray[np.generic]],
    name: str,
    shape: Shape,
    dims: tuple[int, ...],
    path: object,
) -> NDArray[np.int32]:
    array = _take(arrays, name, "iu", path)
    if array.shape != dims:
        raise ModelError(f"{path}: array {name} is {array.shape}, not {dims}")
    wide = array.astype(np.int64)
    if not 0 <= int(wide.min()) <= int(wide.max()) < shape.experts:
        raise ModelError(f"{path}: array {name} names experts outside the {shape.experts}")
    experts = wide.astype(np.int32)
    experts.flags.writeable = False
    return experts


def _check_agreement(run: GoldenRun, index: int, path: object) -> None:
    """Hold the greedy tokens and the margins against the logits that they come from."""
    deciding = run.logits[len(run.prompt) - 1 :]
    if tuple(np.argmax(deciding, axis=-1).tolist()) != run.greedy:
        raise ModelError(f"{path}: greedy_{index} is not what logits_{index} gives")
    if float(np.max(np.abs(margins(run.logits) - run.margin))) > _MARGIN_TOLERANCE:
        raise ModelError(f"{path}: margin_{index} is not what logits_{index} gives")


def margins(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Give top-1 minus top-2 of every row."""
    if logits.shape[1] == 1:
        return np.zeros(len(logits), dtype=np.float32)
    top = np.partition(logits, logits.shape[1] - 2, axis=-1)
    between: NDArray[np.float32] = top[:, -1] - top[:, -2]
    return between


def encode_golden(golden: Golden) -> bytes:
    """Give the bytes of a `.npz`; equal runs give equal bytes, whenever they are written."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for index, run in enumerate(golden.runs):
            for name, array in _name_arrays(run, index).items():
                plain = io.BytesIO()
                np.lib.format.write_array(plain, np.ascontiguousarray(array), allow_pickle=False)
                # ZipInfo without a date has the zip format's first one.
                archive.writestr(zipfile.ZipInfo(name + ".npy"), plain.getvalue())
    return stream.getvalue()


def _name_arrays(run: GoldenRun, index: int) -> dict[str, NDArray[np.generic]]:
    named: dict[str, NDArray[np.generic]] = {
        f"prompt_{index}": np.array(run.prompt, dtype=np.int32),
        f"greedy_{index}": np.array(run.greedy, dtype=np.int32),
        f"logits_{index}": run.logits,
        f"margin_{index}": run.margin,
    }
    for layer, keys in run.keys.items():
        named[f"k_{index}_l{layer}"] = keys
    for layer, values in run.values.items():
        named[f"v_{index}_l{layer}"] = values
    for name, array in (
        ("route_idx", run.route_experts),
        ("route_w", run.route_weights),
        ("route_margin", run.route_margin),
    ):
        if array is not None:
            named[f"{name}_{index}"] = array
    return named
