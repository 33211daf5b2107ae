"""Write a calbin from a Hugging Face folder: the packer of the simulated board.

Source: `specs/calbin.md`, R6.5, decision 11 (lanes).
"""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, get_args

import attrs
import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from laneway.adapters.golden import encode_golden, load_golden
from laneway.adapters.huggingface import CONFIG_NAME, Config, locate_parameters, read_config
from laneway.adapters.manifest import (
    BYTES_MAX,
    FORMAT,
    FORMAT_VERSION,
    GOLDEN_NAME,
    LANES_MAX,
    MANIFEST_NAME,
    PARAMETERS_NAME,
    SUBMODELS_MAX,
    TOKENIZER_NAME,
    Chips,
    FileRecord,
    KvLayout,
    KvPlan,
    LaneRule,
    Layout,
    Manifest,
    Needs,
    Shape,
    Submodel,
    check_manifest,
    encode_manifest,
)
from laneway.adapters.parameters import kv_bytes_per_token, parameter_shapes, place_bytes
from laneway.adapters.reference import make_golden
from laneway.adapters.rooted import Root, open_root
from laneway.adapters.staging import create_file, stage_folder
from laneway.adapters.tensors import (
    StoredParameters,
    TensorEntry,
    read_bf16,
    read_header,
    write_bf16,
)
from laneway.engine.errors import ModelError

COMPILER = "laneway-pack 0.1.0"
_NEEDS = Needs(runtime="0.1", driver="0.1", firmware="0.1")
_LANES_MIN = 8

StrPath = str | os.PathLike[str]
Progress = Callable[[str], None]


@attrs.frozen
class _Plan:
    """The choices that the packer makes, all checked."""

    name: str
    batch: tuple[int, ...]
    lanes: int
    context: int
    layout: Layout
    lane_rule: LaneRule
    fixed_rows: bool
    kv_layout: KvLayout


def pack(
    source: StrPath,
    destination: StrPath,
    *,
    batch: Sequence[int] = (1,),
    lanes: int | None = None,
    context: int | None = None,
    chips: int | None = None,
    layout: str | None = None,
    lane_rule: str = "length_zero",
    fixed_rows: bool = False,
    kv_layout: str = "all",
    model_root: StrPath | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write a calbin from a Hugging Face Qwen3 or Qwen3-MoE folder; return its manifest.

    Lanes are by default twice the largest batch and at least 8, so that two jobs in flight each
    have a full batch. With ``fixed_rows`` row i of a batch is lane i, or i behind a multiple of the
    batch. The context is by default all that the model knows. Chips and layout follow
    from each other; together they default to 2 and tp2. Parameters in float32 or float16 are
    rounded to bf16, and the manifest's `compiler` says so. `progress` is told what is being done.

    Raises: ModelError in one line: what is wrong with the folder, an option or the destination.
    Nothing is left behind then.
    """
    report = progress or _say_nothing
    root = open_root(source, model_root=model_root)
    if root.has(MANIFEST_NAME) and not root.has(CONFIG_NAME):
        raise ModelError(f"{root.folder}: is packed already; pack the Hugging Face folder again")
    config = read_config(root)
    plan = _make_plan(
        config,
        name=name if name is not None else default_name(root.folder),
        batch=batch,
        lanes=lanes,
        context=context,
        chips=chips,
        layout=layout,
        lane_rule=lane_rule,
        fixed_rows=fixed_rows,
        kv_layout=kv_layout,
    )
    with stage_folder(destination) as folder:
        files: dict[str, FileRecord] = {}
        report("parameters")
        files[PARAMETERS_NAME], rounded = _pack_parameters(root, folder, config.shape)
        if rounded:
            report(f"parameters rounded from {rounded} to BF16")
        files[GOLDEN_NAME] = _pack_golden(root, folder, config.shape, plan.context, report)
        if root.has(TOKENIZER_NAME):
            report("tokenizer")
            files[TOKENIZER_NAME] = _pack_tokenizer(root, folder, config.shape)
        manifest = _make_manifest(config, plan, files, rounded=rounded)
        check_manifest(manifest, path=Path(destination) / MANIFEST_NAME)
        with create_file(folder / MANIFEST_NAME) as file:
            file.write(encode_manifest(manifest))
    return manifest


def _say_nothing(message: str) -> None:
    pass


def default_name(folder: Path) -> str:
    """Name a model after its folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip(".-")[:63] or "model"


def _make_plan(
    config: Config,
    *,
    name: str,
    batch: Sequence[int],
    lanes: int | None,
    context: int | None,
    chips: int | None,
    layout: str | None,
    lane_rule: str,
    fixed_rows: bool,
    kv_layout: str,
) -> _Plan:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}", name):
        raise ModelError(f"name {name!r}: 1 to 63 letters, digits, dots, dashes are wanted")
    batches = tuple(sorted(set(batch)))
    if not batches or batches[0] < 1 or 2 * len(batches) > SUBMODELS_MAX:
        raise ModelError(f"batch {list(batch)}: 1 to {SUBMODELS_MAX // 2} sizes from 1 are wanted")
    lane_count = max(_LANES_MIN, 2 * batches[-1]) if lanes is None else lanes
    if lane_count < batches[-1]:
        raise ModelError(f"lanes {lanes}: fewer than the largest batch, {batches[-1]}")
    if lane_count > LANES_MAX:
        raise ModelError(f"lanes {lane_count}: the simulated board has at most {LANES_MAX}")
    positions = config.context_max if context is None else context
    if not 1 <= positions <= config.context_max:
        raise ModelError(
            f"context {context}: the model has 1 to {config.context_max} positions"
            " (max_position_embeddings)"
        )
    chosen = layout or ("single" if chips == 1 else "tp2")
    wanted = 1 if chosen == "single" else 2
    if chips not in (None, wanted):
        raise ModelError(f"chips {chips}: layout {chosen} is for {wanted}")
    for option, value, accepted in (
        ("layout", chosen, get_args(Layout)),
        ("lane_rule", lane_rule, get_args(LaneRule)),
        ("kv_layout", kv_layout, get_args(KvLayout)),
    ):
        if value not in accepted:
            raise ModelError(f"{option} {value!r}: one of {', '.join(accepted)} is wanted")
    if chosen in ("ep2", "tpep") and config.shape.experts == 0:
        raise ModelError(f"layout {chosen}: splits experts, the model is dense")
    return msgspec.convert(
        {
            "name": name,
            "batch": batches,
            "lanes": lane_count,
            "context": positions,
            "layout": chosen,
            "lane_rule": lane_rule,
            "fixed_rows": fixed_rows,
            "kv_layout": kv_layout,
        },
        type=_Plan,
    )


def _pack_parameters(root: Root, folder: Path, shape: Shape) -> tuple[FileRecord, str]:
    """Write the parameters one by one; return the file's record and what was rounded, if any."""
    path = root.folder / PARAMETERS_NAME
    with root.open(PARAMETERS_NAME, bytes_max=BYTES_MAX[PARAMETERS_NAME]) as file:
        entries = read_header(file, path=path)
        found = locate_parameters(entries, shape, path=path)
        if shape.tied_head and "lm_head.weight" in entries:
            _check_tied(file, entries, path)

        def load(name: str) -> NDArray[np.uint16]:
            return read_bf16(file, found[name], path=path)

        with create_file(folder / PARAMETERS_NAME) as packed:
            sha256, size = write_bf16(packed, parameter_shapes(shape), load)
    rounded = sorted({entry.dtype for entry in found.values()} - {"BF16"})
    return FileRecord(sha256=sha256, bytes=size), " and ".join(rounded)


def _check_tied(file: BinaryIO, entries: dict[str, TensorEntry], path: Path) -> None:
    """Refuse a stored head that differs from the embedding it should be tied to."""
    head, embedding = entries["lm_head.weight"], entries["model.embed_tokens.weight"]
    if head.shape != embedding.shape or not np.array_equal(
        read_bf16(file, head, path=path), read_bf16(file, embedding, path=path)
    ):
        raise ModelError(
            f"{path}: lm_head.weight differs from model.embed_tokens.weight,"
            " but tie_word_embeddings is true"
        )


def _pack_golden(
    root: Root, folder: Path, shape: Shape, context: int, report: Progress
) -> FileRecord:
    """Keep the golden runs that came with the model; compute them if there are none that fit."""
    if root.has(GOLDEN_NAME):
        golden = load_golden(root, shape)
        if golden.positions_max <= context:
            report("golden runs of the model")
            raw = root.read(GOLDEN_NAME, bytes_max=BYTES_MAX[GOLDEN_NAME])
            return _write(folder / GOLDEN_NAME, raw)
        report(f"golden runs need {golden.positions_max} positions, the context is {context}")
    report("golden runs from the float32 reference")
    packed = open_root(folder)
    path = packed.folder / PARAMETERS_NAME
    with packed.open(PARAMETERS_NAME, bytes_max=BYTES_MAX[PARAMETERS_NAME]) as file:
        parameters = StoredParameters(file, read_header(file, path=path), path=path)
        golden = make_golden(shape, parameters, context=context, parameter_count=parameters.count)
    return _write(folder / GOLDEN_NAME, encode_golden(golden))


def _pack_tokenizer(root: Root, folder: Path, shape: Shape) -> FileRecord:
    raw = root.read(TOKENIZER_NAME, bytes_max=BYTES_MAX[TOKENIZER_NAME])
    check_tokenizer(raw, shape, path=root.folder / TOKENIZER_NAME)
    return _write(folder / TOKENIZER_NAME, raw)


def check_tokenizer(raw: bytes, shape: Shape, *, path: Path) -> None:
    """Refuse a tokenizer that cannot be read, or that gives ids outside the vocabulary."""
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path}: no tokenizer: {error}") from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= shape.vocab:
        raise ModelError(f"{path}: has token id {largest}, the vocabulary is {shape.vocab}")


def _write(path: Path, raw: bytes) -> FileRecord:
    with create_file(path) as file:
        file.write(raw)
    return FileRecord(sha256=hashlib.sha256(raw).hexdigest(), bytes=len(raw))


def _make_manifest(
    config: Config, plan: _Plan, files: dict[str, FileRecord], *, rounded: str
) -> Manifest:
    shape = config.shape
    per_token = kv_bytes_per_token(shape)
    chip_count = 1 if plan.layout == "single" else 2
    return Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        name=plan.name,
        architecture=config.architecture,
        compiler=COMPILER + (f" ({rounded} rounded to BF16)" if rounded else ""),
        needs=_NEEDS,
        shape=shape,
        context=plan.context,
        lanes=plan.lanes,
        lane_rule=plan.lane_rule,
        fixed_rows=plan.fixed_rows,
        kv_layout=plan.kv_layout,
        layout=plan.layout,
        chips=Chips(count=chip_count, mask=(1 << chip_count) - 1),
        kv=KvPlan(bytes_per_token=per_token, bytes_per_lane=plan.context * per_token),
        bytes=place_bytes(
            shape,
            plan.layout,
            context=plan.context,
            lanes=plan.lanes,
            batch_max=plan.batch[-1],
        ),
        submodels=tuple(
            Submodel(
                name=f"{task}_b{size}",
                task=task,
                max_batch=size,
                max_tokens=plan.context if task == "prefill" else 1,
                incremental_prefill=task == "prefill",
            )
            for task in ("prefill", "decode")
            for size in plan.batch
        ),
        eos_token_ids=config.eos_token_ids,
        files=files,
    )
