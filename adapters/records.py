"""Verification records as a JSON file: what ``laneway probe --record`` writes, ``--records`` reads.

A file is ``{"version": 1, "records": […]}`` with every field of every record, nothing extra. It may
come from anywhere: its size, its counts and every text in it are bounded, and what is wrong is one
line that names the place. Writing replaces the file as a whole.

Source: R1.2, R5.2, E24.
"""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from laneway.adapters.files import read_bounded
from laneway.adapters.staging import create_file, sync_folder
from laneway.engine.errors import ConfigurationError
from laneway.engine.evidence import Fingerprint, VerificationRecord

VERSION = 1
BYTES_MAX = 1 << 20
RECORDS_MAX = 256

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Z][A-Z0-9_]*$")]
_Test = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[a-z][a-z0-9-]*$")]
_Word = Annotated[str, msgspec.Meta(max_length=64)]
_Note = Annotated[str, msgspec.Meta(max_length=1024)]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?$", max_length=64)]
_Value = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Mask = Annotated[int, msgspec.Meta(ge=0, le=0xFF)]


class _Fingerprint(msgspec.Struct, forbid_unknown_fields=True):
    backend: _Word
    backend_version: _Word
    runtime: _Word
    driver: _Word
    firmware: _Word
    chip_mask: _Mask
    calbin_sha256: _Sha256


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    capability: _Name
    result: Literal["passed", "failed"]
    value: _Value
    test: _Test
    seed: _Seed
    note: _Note
    fingerprint: _Fingerprint


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    records: Annotated[list[_Record], msgspec.Meta(max_length=RECORDS_MAX)]


def read_records(path: str | os.PathLike[str]) -> tuple[VerificationRecord, ...]:
    """Read a file of records, in their order.

    Raises: ConfigurationError that names the file and what is wrong with it.
    """
    try:
        text = read_bounded(path, bytes_max=BYTES_MAX)
    except OSError as error:
        raise ConfigurationError(
            f"records {path}: cannot be read: {error.strerror or error}"
        ) from error
    return decode_records(text, about=str(path))


def decode_records(text: bytes, *, about: str) -> tuple[VerificationRecord, ...]:
    """Return the records of a file's text. Raises: ConfigurationError."""
    if len(text) > BYTES_MAX:
        raise ConfigurationError(f"records {about}: more than {BYTES_MAX} bytes")
    try:
        found = msgspec.json.decode(text, type=_File)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"records {about}: not a file of verification records: {error}; make one with"
            " laneway probe DEVICE --record FILE"
        ) from error
    if found.version != VERSION:
        raise ConfigurationError(
            f"records {about}: version {found.version}, this laneway reads {VERSION}"
        )
    records = tuple(_take(record) for record in found.records)
    for number, record in enumerate(records):
        texts = (record.note, *_texts(record.fingerprint))
        if not all(text.isprintable() for text in texts):
            raise ConfigurationError(f"records {about}: record {number} holds a control character")
    return records


def _take(record: _Record) -> VerificationRecord:
    return VerificationRecord(
        capability=record.capability,
        result=record.result,
        value=record.value,
        test=record.test,
        seed=record.seed,
        note=record.note,
        fingerprint=Fingerprint(**msgspec.structs.asdict(record.fingerprint)),
    )


def _texts(fingerprint: Fingerprint) -> tuple[str, ...]:
    return (
        *(fingerprint.backend, fingerprint.backend_version),
        *(fingerprint.runtime, fingerprint.driver, fingerprint.firmware),
    )


def encode_records(records: Sequence[VerificationRecord]) -> bytes:
    """Return the text of a file, one line a record."""
    lines = [msgspec.json.encode(record).decode() for record in records]
    body = ",\n".join(lines)
    return f'{{"version":{VERSION},"records":[\n{body}\n]}}\n'.encode()


def merge_records(
    old: Sequence[VerificationRecord], new: Sequence[VerificationRecord]
) -> tuple[VerificationRecord, ...]:
    """Return old and new; of one capability on one system the new record replaces the old."""
    fresh = {(record.capability, record.fingerprint) for record in new}
    kept = [record for record in old if (record.capability, record.fingerprint) not in fresh]
    return (*kept, *new)


def write_records(path: str | os.PathLike[str], records: Sequence[VerificationRecord]) -> None:
    """Add records to a file, made if it is not there; whole or not at all.

    Raises: ConfigurationError if what is there is no file of records, or it cannot be written.
    """
    target = Path(path).absolute()
    old = read_records(target) if target.exists() else ()
    merged = merge_records(old, records)
    text = encode_records(merged)
    if len(merged) > RECORDS_MAX or len(text) > BYTES_MAX:
        raise ConfigurationError(
            f"records {path}: {len(merged)} records are more than a file holds: take a new one"
        )
    decode_records(text, about=str(path))
    staged = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    try:
        with create_file(staged) as file:
            file.write(text)
        staged.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise ConfigurationError(
            f"records {path}: cannot be written: {error.strerror or error}"
        ) from error
