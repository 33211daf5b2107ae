"""Name every parameter of a model, with its shape, and say on which chip its bytes are.

The layouts, as bookkeeping: what the simulator computes does not depend on them.

======  ===============================================================  =====================
layout  parameters                                                       KV
======  ===============================================================  =====================
single  all on the one chip                                              all on the one chip
tp2     embedding on chip 0, half of every other tensor on each          half the KV heads each
pp2     embedding and first layers on chip 0, the rest and head on 1     by layer
ep2     half of the experts each, everything else on both                by lane
tpep    half of the experts each, everything else as tp2                 half the KV heads each
======  ===============================================================  =====================

Odd counts: the larger half is on chip 0. A tied head under pp2 needs the embedding on both stages,
so it is there twice.

Source: specs/calbin.md, R11.3.
"""

import math
from typing import assert_never

from laneway.adapters.manifest import ChipBytes, Layout, Shape

BF16_BYTES = 2
_WORKSPACE_GRAIN_BYTES = 4096


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name every parameter with its shape, in the order in which they are stored."""
    hidden, queries = shape.hidden, shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "self_attn.q_norm.weight": (shape.head_dim,),
            prefix + "self_attn.k_norm.weight": (shape.head_dim,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
        if shape.experts == 0:
            shapes |= _mlp_shapes(prefix + "mlp.", hidden, shape.intermediate)
            continue
        shapes[prefix + "mlp.gate.weight"] = (shape.experts, hidden)
        for expert in range(shape.experts):
            inside = f"{prefix}mlp.experts.{expert}."
            shapes |= _mlp_shapes(inside, hidden, shape.moe_intermediate)
    shapes["model.norm.weight"] = (hidden,)
    if not shape.tied_head:
        shapes["lm_head.weight"] = (shape.vocab, hidden)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (width, hidden),
        prefix + "up_proj.weight": (width, hidden),
        prefix + "down_proj.weight": (hidden, width),
    }


def parameter_bytes(shape: Shape) -> int:
    """Count the bytes of all parameters in bf16, each once."""
    return sum(BF16_BYTES * math.prod(dims) for dims in parameter_shapes(shape).values())


def kv_bytes_per_token(shape: Shape) -> int:
    """Count the bf16 KV bytes of one position over all layers."""
    return shape.layers * 2 * shape.kv_heads * shape.head_dim * BF16_BYTES


def place_bytes(
    shape: Shape, layout: Layout, *, context: int, lanes: int, batch_max: int
) -> ChipBytes:
    """Say how many bytes of each kind the layout puts on each chip.

    Shapes: every tuple has one number per chip.
    """
    workspace = _workspace_bytes(shape, context=context, batch_max=batch_max)
    chip_count = 1 if layout == "single" else 2
    return ChipBytes(
        params=_place_parameters(shape, layout),
        kv=_place_kv(shape, layout, context=context, lanes=lanes),
        workspace=(workspace,) * chip_count,
        other=(0,) * chip_count,
    )


def _place_parameters(shape: Shape, layout: Layout) -> tuple[int, ...]:
    if layout == "single":
        return (parameter_bytes(shape),)
    chips = [0, 0]
    for name, dims in parameter_shapes(shape).items():
        count = math.prod(dims)
        first, second = _place_tensor(name, count, shape, layout)
        chips[0] += BF16_BYTES * first
        chips[1] += BF16_BYTES * second
    return tuple(chips)


def _place_tensor(name: str, count: int, shape: Shape, layout: Layout) -> tuple[int, int]:
    parts = name.split(".")
    if layout == "pp2":
        if parts[1] == "layers":
            return _whole(count, on_second=int(parts[2]) >= _larger_half(shape.layers))
        if parts[1] == "embed_tokens":
            return count, count if shape.tied_head else 0
        return 0, count
    if layout in ("ep2", "tpep") and "experts" in parts:
        expert = int(parts[parts.index("experts") + 1])
        return _whole(count, on_second=expert >= _larger_half(shape.experts))
    if layout == "ep2":
        return count, count
    if parts[1] == "embed_tokens":
        return count, 0
    return _larger_half(count), count - _larger_half(count)


def _place_kv(shape: Shape, layout: Layout, *, context: int, lanes: int) -> tuple[int, ...]:
    total = lanes * context * kv_bytes_per_token(shape)
    match layout:
        case "single":
            return (total,)
        case "tp2" | "tpep":
            # With an odd number of KV heads the middle one counts half on each chip.
            return (total // 2, total - total // 2)
        case "ep2":
            first = total // lanes * _larger_half(lanes)
        case "pp2":
            first = total // shape.layers * _larger_half(shape.layers)
        case _:
            assert_never(layout)
    return (first, total - first)


def _workspace_bytes(shape: Shape, *, context: int, batch_max: int) -> int:
    """Estimate what the kernels of one chip need.

    That is float32 activations of the longest row, and bf16 logits of the largest batch.
    """
    width = (
        shape.experts_per_token * shape.moe_intermediate if shape.experts else shape.intermediate
    )
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    need = context * (2 * shape.hidden + attention + 2 * width) * 4
    need += batch_max * shape.vocab * BF16_BYTES
    return -(-need // _WORKSPACE_GRAIN_BYTES) * _WORKSPACE_GRAIN_BYTES


def _larger_half(count: int) -> int:
    return count - count // 2


def _whole(count: int, *, on_second: bool) -> tuple[int, int]:
    return (0, count) if on_second else (count, 0)
