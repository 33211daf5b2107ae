"""Read a Hugging Face Qwen3 or Qwen3-MoE folder: what can be packed, and a clear no for the rest.

Everything that would change the arithmetic and is not in `specs/calbin.md` is refused by name,
never ignored. Tensors may stand one per expert, or fused as transformers 5 holds them in memory:
`mlp.experts.gate_up_proj` [experts, 2 x width, hidden] with the gate's rows first, and
`mlp.experts.down_proj` [experts, hidden, width].
"""

import re
from collections.abc import Mapping
from typing import Any, cast

import attrs
import msgspec

from laneway.adapters.manifest import (
    EOS_TOKENS_MAX,
    PARAMETERS_NAME,
    Architecture,
    Shape,
    shape_faults,
)
from laneway.adapters.parameters import parameter_shapes
from laneway.adapters.rooted import Root
from laneway.adapters.tensors import TensorEntry
from laneway.engine.errors import ModelError

CONFIG_NAME = "config.json"
_GENERATION_NAME = "generation_config.json"
_CONFIG_BYTES_MAX = 4 << 20

_CLASSES: dict[str, Architecture] = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
_SHARD = re.compile(r".*-of-[0-9]+\.(safetensors|bin)|.*\.safetensors\.index\.json")
_FUSED = re.compile(r"model\.layers\.[0-9]+\.mlp\.experts\.(gate_up_proj|down_proj)(\.weight)?")


@attrs.frozen
class Config:
    """What of `config.json` a calbin needs."""

    architecture: Architecture
    shape: Shape
    context_max: int
    eos_token_ids: tuple[int, ...]


@attrs.frozen
class _Keys:
    """The keys of one JSON object, read with a name and a type."""

    path: object
    stated: Mapping[str, Any]

    def refuse(self, key: str, why: str) -> ModelError:
        named = key if key.isidentifier() else _show(key)
        return ModelError(f"{self.path}: {named} is {_show(self.stated.get(key))}: {why}")

    def integer(self, key: str, default: int | None = None) -> int:
        found = self.stated.get(key)
        if found is None:
            found = default
        if found is None:
            raise ModelError(f"{self.path}: {key} is missing")
        if type(found) is not int or not 1 <= found <= 1 << 20:
            raise self.refuse(key, f"a whole number from 1 to {1 << 20} is wanted")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.stated.get(key)
        if found is None:
            found = default
        if found is None:
            raise ModelError(f"{self.path}: {key} is missing")
        if type(found) not in (int, float):
            raise self.refuse(key, "a number is wanted")
        return float(found)

    def flag(self, key: str, default: bool) -> bool:
        found = self.stated.get(key, default)
        if type(found) is not bool:
            raise self.refuse(key, "true or false is wanted")
        return found


def read_config(root: Root) -> Config:
    """Read `config.json`, and the end tokens of `generation_config.json` if that is there.

    Raises: ModelError naming the first key that cannot be packed, with its value.
    """
    _refuse_shards(root)
    keys = _read_keys(root, CONFIG_NAME)
    architecture = _read_architecture(keys)
    _refuse_features(keys)
    head_count = keys.integer("num_attention_heads")
    hidden = keys.integer("hidden_size")
    moe = architecture == "qwen3_moe"
    moe_width = keys.integer("moe_intermediate_size") if moe else 0
    head_dim = keys.integer("head_dim", hidden // head_count or None)
    shape = Shape(
        layers=keys.integer("num_hidden_layers"),
        hidden=hidden,
        heads=head_count,
        kv_heads=keys.integer("num_key_value_heads"),
        head_dim=head_dim,
        intermediate=keys.integer("intermediate_size", moe_width or None),
        experts=_read_expert_count(keys) if moe else 0,
        experts_per_token=keys.integer("num_experts_per_tok") if moe else 0,
        moe_intermediate=moe_width,
        norm_topk_prob=keys.flag("norm_topk_prob", False) if moe else False,
        vocab=keys.integer("vocab_size"),
        rms_norm_eps=_read_between(keys, "rms_norm_eps", 1e-12, 1.0, default=1e-6),
        rope_theta=_read_rope_theta(keys),
        tied_head=keys.flag("tie_word_embeddings", False),
    )
    try:
        # Structs check their bounds when they are decoded, not when they are made.
        msgspec.convert(msgspec.to_builtins(shape), type=Shape)
    except msgspec.ValidationError as error:
        raise ModelError(f"{keys.path}: too large for the simulated board: {error}") from error
    faults = shape_faults(architecture, shape)
    if faults:
        raise ModelError(f"{keys.path}: {faults[0]}")
    return Config(
        architecture=architecture,
        shape=shape,
        context_max=keys.integer("max_position_embeddings"),
        eos_token_ids=_read_end_tokens(root, keys, shape.vocab),
    )


def _refuse_shards(root: Root) -> None:
    names = root.names()
    shards = [name for name in names if _SHARD.fullmatch(name)]
    if shards:
        raise ModelError(
            f"{root.folder}: {shards[0]}: the parameters are in several files; save them as one"
            f" {PARAMETERS_NAME}"
        )
    if CONFIG_NAME not in names:
        raise ModelError(f"{root.folder}: {CONFIG_NAME} is missing; not a Hugging Face folder")


def _read_keys(root: Root, name: str) -> _Keys:
    path = root.folder / name
    try:
        stated = msgspec.json.decode(
            root.read(name, bytes_max=_CONFIG_BYTES_MAX), type=dict[str, Any]
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: no JSON object: {error}") from error
    return _Keys(path, stated)


def _read_architecture(keys: _Keys) -> Architecture:
    known = f"only {' and '.join(_CLASSES)} can be packed"
    classes = keys.stated.get("architectures")
    model_type = keys.stated.get("model_type")
    if classes is None and model_type in _CLASSES.values():
        return cast(Architecture, model_type)
    if not isinstance(classes, list) or len(classes) != 1 or classes[0] not in list(_CLASSES):
        raise keys.refuse("architectures", known)
    architecture = _CLASSES[classes[0]]
    if model_type not in (None, architecture):
        raise keys.refuse("model_type", f"architectures says {classes[0]}")
    return architecture


def _refuse_features(keys: _Keys) -> None:
    """Refuse by name what changes the arithmetic."""
    layer_types = keys.stated.get("layer_types")
    if keys.flag("use_sliding_window", False):
        raise keys.refuse("use_sliding_window", "only full attention can be packed")
    if layer_types is not None and (
        not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    ):
        raise keys.refuse("layer_types", "only full attention can be packed")
    for key, accepted, why in (
        ("attention_bias", (None, False), "projections with a bias cannot be packed"),
        ("mlp_bias", (None, False), "projections with a bias cannot be packed"),
        ("hidden_act", (None, "silu"), "only silu can be packed"),
        ("mlp_only_layers", (None, []), "layers without experts cannot be packed"),
        ("decoder_sparse_step", (None, 1), "only 1 can be packed: experts in every layer"),
        ("quantization_config", (None,), "quantized parameters cannot be packed; save as bf16"),
        ("partial_rotary_factor", (None, 1, 1.0), "only whole heads can be rotated"),
    ):
        if keys.stated.get(key) not in accepted:
            raise keys.refuse(key, why)


def _read_expert_count(keys: _Keys) -> int:
    names = [name for name in ("num_experts", "num_local_experts") if name in keys.stated]
    counts = {keys.integer(name) for name in names}
    if len(counts) > 1:
        raise keys.refuse("num_local_experts", "num_experts says something else")
    return counts.pop() if counts else keys.integer("num_experts")


def _read_between(
    keys: _Keys, key: str, low: float, high: float, default: float | None = None
) -> float:
    found = keys.number(key, default)
    if not low < found <= high:
        raise keys.refuse(key, f"a number above {low:g} up to {high:g} is wanted")
    return found


def _read_rope_theta(keys: _Keys) -> float:
    """Read the base of the rotary embedding; of its many types only the default one is packed."""
    found: list[tuple[_Keys, float]] = []
    if keys.stated.get("rope_theta") is not None:
        found.append((keys, _read_between(keys, "rope_theta", 1.0, 1e12)))
    for key in ("rope_parameters", "rope_scaling"):
        inner = keys.stated.get(key)
        if inner is None:
            continue
        if not isinstance(inner, dict):
            raise keys.refuse(key, "an object is wanted")
        inside = _Keys(f"{keys.path}: {key}", inner)
        for name in ("rope_type", "type"):
            if inner.get(name, "default") != "default":
                raise inside.refuse(name, "only the default rotary embedding can be packed")
        extra = set(inner) - {"rope_type", "type", "rope_theta"}
        if extra - {"partial_rotary_factor"} or inner.get("partial_rotary_factor", 1) != 1:
            raise inside.refuse(sorted(extra)[0], "only the default rotary embedding can be packed")
        if "rope_theta" in inner:
            found.append((inside, _read_between(inside, "rope_theta", 1.0, 1e12)))
    if not found:
        raise ModelError(f"{keys.path}: rope_theta is missing, also from rope_parameters")
    if len({theta for _, theta in found}) > 1:
        raise found[-1][0].refuse("rope_theta", f"elsewhere it is {found[0][1]:g}")
    return found[0][1]


def _read_end_tokens(root: Root, keys: _Keys, vocab: int) -> tuple[int, ...]:
    sources = [keys]
    if root.has(_GENERATION_NAME):
        sources.append(_read_keys(root, _GENERATION_NAME))
    tokens: list[int] = []
    for source in sources:
        stated = source.stated.get("eos_token_id")
        listed = [] if stated is None else stated if isinstance(stated, list) else [stated]
        for token in listed:
            if type(token) is not int or not 0 <= token < vocab:
                raise source.refuse("eos_token_id", f"token ids from 0 to {vocab - 1} are wanted")
            if token not in tokens:
                tokens.append(token)
    if len(tokens) > EOS_TOKENS_MAX:
        raise keys.refuse("eos_token_id", f"at most {EOS_TOKENS_MAX} end tokens can be packed")
    return tuple(tokens)


def locate_parameters(
    entries: Mapping[str, TensorEntry], shape: Shape, *, path: object
) -> dict[str, TensorEntry]:
    """Find every parameter of the model in the tensors of a file, splitting fused experts.

    Raises: ModelError naming a tensor that is missing, misshapen or unknown.
    """
    wanted = parameter_shapes(shape)
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        if _FUSED.fullmatch(name):
            parts = _split_fused(entry, shape, path=path)
            twice = sorted(found.keys() & parts.keys() | entries.keys() & parts.keys())
            if twice:
                raise ModelError(f"{path}: tensor {twice[0]} is there twice, also in {name}")
            found |= parts
        elif name in wanted:
            found[name] = entry
        elif name.endswith(".bias"):
            raise ModelError(f"{path}: tensor {name}: projections with a bias cannot be packed")
        elif not name.endswith("rotary_emb.inv_freq") and not (
            name == "lm_head.weight" and shape.tied_head
        ):
            raise ModelError(f"{path}: tensor {name} is not part of the model in {CONFIG_NAME}")
    missing = [name for name in wanted if name not in found]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ModelError(f"{path}: tensor {missing[0]} is missing{others}")
    for name, dims in wanted.items():
        if found[name].shape != dims:
            raise ModelError(
                f"{path}: tensor {name} has the shape {list(found[name].shape)},"
                f" {CONFIG_NAME} gives {list(dims)}"
            )
    return {name: found[name] for name in wanted}


def _split_fused(entry: TensorEntry, shape: Shape, *, path: object) -> dict[str, TensorEntry]:
    """Name the parts of a fused tensor.

    Why the exact shapes are safe: the transposed form has another shape in at least one of the two
    tensors, since not both 2 x width and width can equal hidden.
    """
    width, hidden = shape.moe_intermediate, shape.hidden
    prefix, _, kind = entry.name.removesuffix(".weight").rpartition(".")
    fused_up = kind == "gate_up_proj"
    dims = (shape.experts, 2 * width, hidden) if fused_up else (shape.experts, hidden, width)
    if shape.experts == 0 or entry.shape != dims:
        raise ModelError(
            f"{path}: tensor {entry.name} has the shape {list(entry.shape)},"
            f" {CONFIG_NAME} gives {list(dims)}"
        )
    parts: dict[str, TensorEntry] = {}
    for expert in range(shape.experts):
        inside = f"{prefix}.{expert}."
        if fused_up:
            first = expert * 2 * width * hidden
            for offset, name in ((0, "gate_proj"), (width * hidden, "up_proj")):
                full = f"{inside}{name}.weight"
                parts[full] = entry.part(full, first + offset, (width, hidden))
        else:
            full = f"{inside}down_proj.weight"
            parts[full] = entry.part(full, expert * hidden * width, (hidden, width))
    return parts


def _show(value: object) -> str:
    """Show a value of a JSON file in one short line, as the file has it."""
    shown = msgspec.json.encode(value).decode()
    return shown if len(shown) <= 60 else shown[:57] + "..."
