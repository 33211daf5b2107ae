"""The manifest of a calbin: what it says, and whether it makes sense.

`specs/calbin.md` is the specification. Three levels of trust: `read_manifest` decodes the manifest
and holds its values against each other; `check_artifact` (adapters/calbin.py) also reads every
file; configuring is the device's own check. The SHA-256 of the manifest's bytes names the artifact,
and through the hashes in it every byte of the folder.
"""

import hashlib
import re
from typing import Annotated, Literal

import msgspec

from laneway.adapters.rooted import Root
from laneway.engine.errors import ModelError

MANIFEST_NAME = "manifest.json"
PARAMETERS_NAME = "model.safetensors"
GOLDEN_NAME = "golden.npz"
TOKENIZER_NAME = "tokenizer.json"

FORMAT: Literal["laneway-calbin"] = "laneway-calbin"
FORMAT_VERSION: Literal[1] = 1

# What each file of a calbin may weigh. The simulated board is for models that fit a host's memory.
BYTES_MAX = {
    MANIFEST_NAME: 1 << 20,
    PARAMETERS_NAME: (4 << 30) + (32 << 20),
    GOLDEN_NAME: 1 << 30,
    TOKENIZER_NAME: 64 << 20,
}
SUBMODELS_MAX = 16
TENSORS_MAX = 1 << 16
EOS_TOKENS_MAX = 8
LANES_MAX = 64

Architecture = Literal["qwen3", "qwen3_moe"]
Layout = Literal["single", "tp2", "ep2", "pp2", "tpep"]
LaneRule = Literal["undefined", "length_zero", "mask_csr", "scratch_lane"]
KvLayout = Literal["only_valid", "all", "auto"]

# The simulator's own bounds: what is packed can be configured.
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Layers = Annotated[int, msgspec.Meta(ge=1, le=256)]
_Hidden = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Heads = Annotated[int, msgspec.Meta(ge=1, le=1 << 10)]
_Experts = Annotated[int, msgspec.Meta(ge=0, le=1 << 10)]
_Width = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Lanes = Annotated[int, msgspec.Meta(ge=1, le=LANES_MAX)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_ShortText = Annotated[str, msgspec.Meta(min_length=1, max_length=63, pattern=r"^[ -~]+\Z")]
_Version = Annotated[str, msgspec.Meta(max_length=63, pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})*\Z")]
_FileName = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class Needs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lowest acceptable versions, dotted numbers."""

    runtime: _Version
    driver: _Version
    firmware: _Version


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers that determine every tensor; the three of the experts are 0 in a dense model."""

    layers: _Layers
    hidden: _Hidden
    heads: _Heads
    kv_heads: _Heads
    head_dim: _Heads
    intermediate: _Count
    experts: _Experts
    experts_per_token: _Experts
    moe_intermediate: _Width
    norm_topk_prob: bool
    vocab: _Count
    rms_norm_eps: Annotated[float, msgspec.Meta(ge=1e-12, le=1)]
    rope_theta: Annotated[float, msgspec.Meta(ge=1, le=1e12)]
    tied_head: bool


class Chips(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many chips the artifact was made for, and which."""

    count: Annotated[int, msgspec.Meta(ge=1, le=8)]
    mask: Annotated[int, msgspec.Meta(ge=1, le=255)]


class KvPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV bytes, accounted as bf16."""

    bytes_per_token: _Bytes
    bytes_per_lane: _Bytes


class ChipBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes per chip and kind; one number per chip in each."""

    params: tuple[_Bytes, ...]
    kv: tuple[_Bytes, ...]
    workspace: tuple[_Bytes, ...]
    other: tuple[_Bytes, ...]


class Submodel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry point of the artifact: a task with its largest batch and tokens per row."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=95, pattern=r"^[!-~]+\Z")]
    task: Literal["prefill", "decode"]
    max_batch: _Lanes
    max_tokens: _Count
    incremental_prefill: bool


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file of the folder must be."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    bytes: _Bytes


class Manifest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Everything that a calbin says about itself."""

    format: Literal["laneway-calbin"]
    format_version: Literal[1]
    name: _ShortText
    architecture: Architecture
    compiler: _ShortText
    needs: Needs
    shape: Shape
    context: _Count
    lanes: _Lanes
    lane_rule: LaneRule
    fixed_rows: bool = False
    kv_layout: KvLayout
    layout: Layout
    chips: Chips
    kv: KvPlan
    bytes: ChipBytes
    submodels: tuple[Submodel, ...]
    eos_token_ids: tuple[int, ...]
    files: dict[str, FileRecord]

    @property
    def batch_max(self) -> int:
        """The largest batch of any submodel."""
        return max(submodel.max_batch for submodel in self.submodels)


def encode_manifest(manifest: Manifest) -> bytes:
    """Give the bytes of `manifest.json`; equal manifests give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def identify_manifest(raw: bytes) -> str:
    """Name an artifact by the SHA-256 of its manifest's bytes."""
    return hashlib.sha256(raw).hexdigest()


def read_manifest(root: Root) -> tuple[Manifest, str]:
    """Read and check the manifest of an opened folder; return it with the artifact's identity.

    Raises: ModelError naming the value that is wrong.
    """
    raw = root.read(MANIFEST_NAME, bytes_max=BYTES_MAX[MANIFEST_NAME])
    path = root.folder / MANIFEST_NAME
    try:
        # The version first: a later format has other keys, and the reader should hear why.
        stated = msgspec.json.decode(raw, type=_FormatOnly)
        if (stated.format, stated.format_version) != (FORMAT, FORMAT_VERSION):
            raise ModelError(
                f"{path}: format is {stated.format!r} version {stated.format_version}; this release"
                f" reads {FORMAT!r} version {FORMAT_VERSION}; pack the model again"
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: no valid manifest: {error}") from error
    check_manifest(manifest, path=path)
    return manifest, identify_manifest(raw)


class _FormatOnly(msgspec.Struct, frozen=True):
    format: str
    format_version: int


def check_manifest(manifest: Manifest, *, path: object) -> None:
    """Hold the values of a manifest against each other.

    Raises: ModelError naming the first value that contradicts another.
    """
    for rule in (_shape_faults, _kv_faults, _chip_faults, _submodel_faults, _file_faults):
        faults = rule(manifest)
        if faults:
            raise ModelError(f"{path}: no valid manifest: {faults[0]}")


def shape_faults(architecture: Architecture, shape: Shape) -> list[str]:
    """List what is wrong with a shape, in words."""
    faults = []
    experts = (shape.experts, shape.experts_per_token, shape.moe_intermediate)
    if architecture == "qwen3" and any(experts):
        faults.append(f"a dense model has no experts, but these are {experts}")
    if architecture == "qwen3_moe" and not all(experts):
        faults.append(
            f"experts {shape.experts}, experts_per_token {shape.experts_per_token} and"
            f" moe_intermediate {shape.moe_intermediate} must all be at least 1"
        )
    if shape.experts_per_token > shape.experts:
        faults.append(f"experts_per_token {shape.experts_per_token} of {shape.experts} experts")
    if shape.heads % shape.kv_heads:
        faults.append(f"heads {shape.heads} is no multiple of kv_heads {shape.kv_heads}")
    if shape.layers * (8 + 3 * max(shape.experts, 1)) > TENSORS_MAX:
        faults.append(
            f"{shape.layers} layers of {shape.experts} experts need more than {TENSORS_MAX} tensors"
        )
    if shape.head_dim % 2:
        faults.append(f"head_dim {shape.head_dim} is odd; rotary embedding needs pairs")
    return faults


def _shape_faults(manifest: Manifest) -> list[str]:
    faults = shape_faults(manifest.architecture, manifest.shape)
    if len(manifest.eos_token_ids) > EOS_TOKENS_MAX:
        faults.append(f"{len(manifest.eos_token_ids)} end tokens, at most {EOS_TOKENS_MAX}")
    for token in manifest.eos_token_ids:
        if not 0 <= token < manifest.shape.vocab:
            faults.append(f"end token {token} is outside the vocabulary {manifest.shape.vocab}")
    return faults


def _kv_faults(manifest: Manifest) -> list[str]:
    shape, kv = manifest.shape, manifest.kv
    per_token = shape.layers * 2 * shape.kv_heads * shape.head_dim * 2
    if kv.bytes_per_token != per_token:
        return [f"kv.bytes_per_token is {kv.bytes_per_token}, the shape gives {per_token}"]
    if kv.bytes_per_lane != manifest.context * per_token:
        return [f"kv.bytes_per_lane is {kv.bytes_per_lane}, not context x kv.bytes_per_token"]
    if sum(manifest.bytes.kv) != manifest.lanes * kv.bytes_per_lane:
        return [f"bytes.kv adds up to {sum(manifest.bytes.kv)}, not lanes x kv.bytes_per_lane"]
    return []


def _chip_faults(manifest: Manifest) -> list[str]:
    chips = manifest.chips
    wanted = 1 if manifest.layout == "single" else 2
    if chips.count != wanted:
        return [f"layout {manifest.layout} is for {wanted} chips, chips.count is {chips.count}"]
    if chips.mask.bit_count() != chips.count:
        return [f"chips.mask {chips.mask} does not name {chips.count} chips"]
    if manifest.layout in ("ep2", "tpep") and manifest.shape.experts == 0:
        return [f"layout {manifest.layout} splits experts, the model is dense"]
    for kind in ChipBytes.__struct_fields__:
        if len(getattr(manifest.bytes, kind)) != chips.count:
            return [f"bytes.{kind} does not have {chips.count} numbers"]
    return []


def _submodel_faults(manifest: Manifest) -> list[str]:
    submodels = manifest.submodels
    if len(submodels) > SUBMODELS_MAX:
        return [f"{len(submodels)} submodels, at most {SUBMODELS_MAX}"]
    if {submodel.task for submodel in submodels} != {"prefill", "decode"}:
        return ["submodels must have both tasks, prefill and decode"]
    if len({submodel.name for submodel in submodels}) != len(submodels):
        return ["two submodels have the same name"]
    for submodel in submodels:
        if submodel.max_batch > manifest.lanes:
            return [f"{submodel.name}: max_batch {submodel.max_batch} > lanes {manifest.lanes}"]
        if submodel.max_tokens > manifest.context:
            return [f"{submodel.name}: max_tokens {submodel.max_tokens} > context"]
        if submodel.task == "decode" and submodel.max_tokens != 1:
            return [f"{submodel.name}: a decode takes 1 token, not {submodel.max_tokens}"]
    return []


def _file_faults(manifest: Manifest) -> list[str]:
    for name in (PARAMETERS_NAME, GOLDEN_NAME):
        if name not in manifest.files:
            return [f"files does not name {name}"]
    for name in manifest.files:
        if not _FileName.fullmatch(name) or name == MANIFEST_NAME:
            return [f"files names {name!r}, which is no plain file name"]
        if name not in BYTES_MAX:
            return [f"files names {name!r}, which is no part of the format"]
    return []
