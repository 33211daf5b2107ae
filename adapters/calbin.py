"""Pack, check and inspect the simulated calbin of a model.

`specs/calbin.md` describes the folder. `pack` makes one from a Hugging Face folder,
`check_artifact` proves that one is what its manifest says, `prepare` takes either kind of folder,
`inspect` tells what is in it. Nothing here prints or talks to a device.

Source: E20a, E24, E25, R10.2.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec

from laneway.adapters.golden import load_golden
from laneway.adapters.huggingface import CONFIG_NAME
from laneway.adapters.manifest import (
    BYTES_MAX,
    MANIFEST_NAME,
    PARAMETERS_NAME,
    TOKENIZER_NAME,
    ChipBytes,
    FileRecord,
    Manifest,
    encode_manifest,
    read_manifest,
)
from laneway.adapters.packing import Progress, StrPath, check_tokenizer, default_name, pack
from laneway.adapters.parameters import parameter_bytes, parameter_shapes
from laneway.adapters.rooted import Root, open_root
from laneway.adapters.tensors import read_header
from laneway.engine.errors import ModelError

__all__ = [
    "Artifact",
    "check_artifact",
    "inspect",
    "pack",
    "prepare",
    "read_artifact",
]

_PIECE_BYTES = 1 << 20


@attrs.frozen
class Artifact:
    """A packed calbin: its folder, its manifest and the SHA-256 that names it."""

    folder: Path
    manifest: Manifest
    sha256: str


def read_artifact(folder: StrPath, *, model_root: StrPath | None = None) -> Artifact:
    """Read a calbin's manifest and hold its values against each other; no other file is read.

    Raises: ModelError.
    """
    root = open_root(folder, model_root=model_root)
    manifest, sha256 = read_manifest(root)
    return Artifact(root.folder, manifest, sha256)


def check_artifact(folder: StrPath, *, model_root: StrPath | None = None) -> Artifact:
    """Prove that a calbin is what its manifest says: files, hashes, tensors, golden runs.

    Raises: ModelError naming the first file or value that is not.
    Source: E20a.
    """
    root = open_root(folder, model_root=model_root)
    manifest, sha256 = read_manifest(root)
    unnamed = [each for each in root.names() if each not in {MANIFEST_NAME, *manifest.files}]
    if unnamed:
        raise ModelError(f"{root.folder / unnamed[0]}: is not named in {MANIFEST_NAME}")
    for each, record in manifest.files.items():
        _check_file(root, each, record)
    _check_tensors(root, manifest)
    load_golden(root, manifest.shape, context=manifest.context)
    if TOKENIZER_NAME in manifest.files:
        raw = root.read(TOKENIZER_NAME, bytes_max=BYTES_MAX[TOKENIZER_NAME])
        check_tokenizer(raw, manifest.shape, path=root.folder / TOKENIZER_NAME)
    return Artifact(root.folder, manifest, sha256)


def inspect(folder: StrPath, *, model_root: StrPath | None = None) -> dict[str, Any]:
    """Tell what is in a model folder as JSON values; a Hugging Face folder as it would be packed.

    Raises: ModelError.
    """
    with prepare(folder, model_root=model_root) as packed:
        artifact = check_artifact(packed, model_root=model_root)
        golden = load_golden(open_root(packed, model_root=model_root), artifact.manifest.shape)
    manifest = artifact.manifest
    kinds = ChipBytes.__struct_fields__
    per_chip = [
        {kind: getattr(manifest.bytes, kind)[chip] for kind in kinds}
        for chip in range(manifest.chips.count)
    ]
    shapes = parameter_shapes(manifest.shape)
    return {
        "folder": str(Path(folder).resolve()),
        "artifact": artifact.sha256,
        "parameters": parameter_bytes(manifest.shape) // 2,
        "tensors": len(shapes),
        "chips": [
            {"chip": chip, **numbers, "total": sum(numbers.values())}
            for chip, numbers in enumerate(per_chip)
        ],
        "kv_plan": {
            "lanes": manifest.lanes,
            "context": manifest.context,
            "tokens": manifest.lanes * manifest.context,
            "bytes_per_token": manifest.kv.bytes_per_token,
            "bytes_per_lane": manifest.kv.bytes_per_lane,
            "bytes": sum(manifest.bytes.kv),
        },
        "golden": {
            "runs": len(golden.runs),
            "rows": sum(run.row_count for run in golden.runs),
            "positions": golden.positions_max,
        },
        "manifest": msgspec.json.decode(encode_manifest(manifest)),
    }


@contextmanager
def prepare(
    folder: StrPath, *, model_root: StrPath | None = None, progress: Progress | None = None
) -> Iterator[Path]:
    """Give the packed calbin of a folder: the folder itself, or one packed from it meanwhile.

    What was packed here is removed at the end of the block.

    Raises: ModelError.
    """
    root = open_root(folder, model_root=model_root)
    if root.has(MANIFEST_NAME):
        yield root.folder
        return
    if not root.has(CONFIG_NAME):
        raise ModelError(
            f"{root.folder}: neither {MANIFEST_NAME} (a calbin) nor {CONFIG_NAME}"
            " (a Hugging Face folder) is in it"
        )
    with tempfile.TemporaryDirectory(prefix="laneway-") as temporary:
        packed = Path(temporary).resolve() / default_name(root.folder)
        pack(folder, packed, model_root=model_root, progress=progress)
        yield packed


def _check_file(root: Root, name: str, record: FileRecord) -> None:
    path = root.folder / name
    hasher = hashlib.sha256()
    with root.open(name, bytes_max=BYTES_MAX[name]) as file:
        size = os.fstat(file.fileno()).st_size
        if size != record.bytes:
            raise ModelError(f"{path}: {size} bytes, {MANIFEST_NAME} says {record.bytes}")
        try:
            while piece := file.read(_PIECE_BYTES):
                hasher.update(piece)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if hasher.hexdigest() != record.sha256:
        raise ModelError(
            f"{path}: damaged: its SHA-256 is {hasher.hexdigest()[:12]}…,"
            f" {MANIFEST_NAME} says {record.sha256[:12]}…; pack the model again"
        )


def _check_tensors(root: Root, manifest: Manifest) -> None:
    path = root.folder / PARAMETERS_NAME
    with root.open(PARAMETERS_NAME, bytes_max=BYTES_MAX[PARAMETERS_NAME]) as file:
        entries = read_header(file, path=path)
    wanted = parameter_shapes(manifest.shape)
    for name, dims in wanted.items():
        entry = entries.get(name)
        if entry is None:
            raise ModelError(f"{path}: tensor {name} is missing")
        if entry.dtype != "BF16" or entry.shape != dims:
            raise ModelError(
                f"{path}: tensor {name} is {entry.dtype} {list(entry.shape)},"
                f" {MANIFEST_NAME} gives BF16 {list(dims)}"
            )
    unknown = sorted(entries.keys() - wanted.keys())
    if unknown:
        raise ModelError(f"{path}: tensor {unknown[0]} is not part of the model")
    if sum(manifest.bytes.params) < parameter_bytes(manifest.shape):
        raise ModelError(
            f"{root.folder / MANIFEST_NAME}: bytes.params adds up to less than the parameters"
        )
