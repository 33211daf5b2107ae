"""Compute a Qwen3 or Qwen3-MoE forward in plain numpy float32, to hold devices against.

Independent on purpose: no code in common with the simulator, no KV kept between calls (every call
computes its sequence from the start), whole-sequence matrices instead of token by token. So an
error in a device's incremental KV cannot be repeated here. Slow, and meant to be read next to the
arithmetic in `specs/calbin.md`.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from laneway.adapters.golden import Golden, GoldenRun, margins
from laneway.adapters.manifest import Shape
from laneway.engine.errors import ModelError

# The golden runs of a model that came without.
_PROMPT_LENGTHS = (1, 7, 16, 32)
_GREEDY_TOKENS = 16
_GREEDY_TOKENS_LARGE = 6
_LARGE_PARAMETERS = 64 << 20

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


class Parameters(Protocol):
    """Parameters by name, as float32."""

    def whole(self, name: str) -> Floats:
        """Give a tensor."""
        ...

    def rows(self, name: str, indices: Integers) -> Floats:
        """Give some rows of a tensor."""
        ...


@attrs.frozen(eq=False)
class Routes:
    """Which experts each position used.

    Shapes: experts and weights [layers, positions, k], margin [layers, positions].
    """

    experts: Integers
    weights: Floats
    margin: Floats


@attrs.frozen(eq=False)
class Forward:
    """What one sequence gives.

    Shapes: logits [positions, vocab]; keys and values [layers, kv_heads, positions, head_dim], keys
    after norm and RoPE.
    """

    logits: Floats
    keys: Floats
    values: Floats
    routes: Routes | None


def compute_forward(
    shape: Shape, parameters: Parameters, tokens: Sequence[int], *, first_row: int = 0
) -> Forward:
    """Run a whole sequence from position 0; give the logits of positions from `first_row` on.

    Raises: ModelError if the parameters lead to values that are not finite.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    hidden = parameters.rows("model.embed_tokens.weight", ids)
    cosine, sine = _rotations(shape, len(ids))
    keys, values, routes = [], [], []
    with np.errstate(over="ignore", invalid="ignore"):
        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}."
            normed = _rms_norm(
                hidden, parameters.whole(prefix + "input_layernorm.weight"), shape.rms_norm_eps
            )
            mixed, k, v = _attend(shape, parameters, prefix + "self_attn.", normed, cosine, sine)
            keys.append(k)
            values.append(v)
            hidden = hidden + mixed
            normed = _rms_norm(
                hidden,
                parameters.whole(prefix + "post_attention_layernorm.weight"),
                shape.rms_norm_eps,
            )
            if shape.experts:
                mixed, route = _mix_experts(shape, parameters, prefix + "mlp.", normed)
                routes.append(route)
            else:
                mixed = _swiglu(parameters, prefix + "mlp.", normed)
            hidden = hidden + mixed
        final = parameters.whole("model.norm.weight")
        hidden = _rms_norm(hidden[first_row:], final, shape.rms_norm_eps)
        head = "model.embed_tokens.weight" if shape.tied_head else "lm_head.weight"
        logits = hidden @ parameters.whole(head).T
    if not bool(np.isfinite(logits).all()):
        raise ModelError("the model's logits are not finite in float32; its parameters are damaged")
    return Forward(logits, np.stack(keys), np.stack(values), _stack_routes(routes))


def continue_greedily(
    shape: Shape, parameters: Parameters, prompt: Sequence[int], *, count: int
) -> list[int]:
    """Extend a prompt by the most likely token, `count` times; the lowest id wins a tie."""
    tokens = list(prompt)
    for _ in range(count):
        forward = compute_forward(shape, parameters, tokens, first_row=len(tokens) - 1)
        tokens.append(int(np.argmax(forward.logits[-1])))
    return tokens[len(prompt) :]


def make_golden(
    shape: Shape, parameters: Parameters, *, context: int, parameter_count: int
) -> Golden:
    """Compute golden runs with the reference, for a model that came without.

    Why: fewer tokens for a large model, because the reference computes every sequence from its
    start.
    """
    large = parameter_count > _LARGE_PARAMETERS
    wanted = _GREEDY_TOKENS_LARGE if large else _GREEDY_TOKENS
    runs = []
    for index, length in enumerate(_PROMPT_LENGTHS):
        length = min(length, context)
        count = min(wanted, context - length + 1)
        prompt = _draw_prompt(index, length=length, vocab=shape.vocab)
        greedy, forward = _continue_consistently(shape, parameters, prompt, count=count)
        routes = forward.routes
        layers = sorted({0, shape.layers - 1})
        runs.append(
            GoldenRun(
                prompt=tuple(prompt),
                greedy=tuple(greedy),
                logits=forward.logits,
                margin=margins(forward.logits),
                keys={n: forward.keys[n] for n in layers},
                values={n: forward.values[n] for n in layers},
                route_experts=None if routes is None else routes.experts.astype(np.int32),
                route_weights=None if routes is None else routes.weights,
                route_margin=None if routes is None else routes.margin,
            )
        )
    return Golden(tuple(runs))


def _continue_consistently(
    shape: Shape, parameters: Parameters, prompt: list[int], *, count: int
) -> tuple[list[int], Forward]:
    """Continue a prompt, and give the one forward whose logits decide all of its tokens.

    Why: matrices of another length round otherwise, so a near tie may go one way when its token is
    drawn and the other way in the last forward. Then the run ends there, with the token that the
    last forward decides.
    """
    greedy = continue_greedily(shape, parameters, prompt, count=count)
    while True:
        forward = compute_forward(shape, parameters, [*prompt, *greedy[:-1]])
        decided = np.argmax(forward.logits[len(prompt) - 1 :], axis=-1).tolist()
        agreed = next((n for n in range(len(greedy)) if decided[n] != greedy[n]), None)
        if agreed is None:
            return greedy, forward
        greedy = [*greedy[:agreed], decided[agreed]]


def _draw_prompt(index: int, *, length: int, vocab: int) -> list[int]:
    """Draw token ids from a hash, so that they are the same on every machine and version."""
    ids = []
    for position in range(length):
        drawn = hashlib.sha256(f"laneway golden prompt {index}, {position}".encode()).digest()
        ids.append(int.from_bytes(drawn[:8], "little") % vocab)
    return ids


def _rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    mean: Floats = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    root: Floats = np.sqrt(mean + np.float32(eps))
    return x / root * weight


def _rotations(shape: Shape, length: int) -> tuple[Floats, Floats]:
    pairs = np.arange(0, shape.head_dim, 2, dtype=np.float64)
    frequencies = (shape.rope_theta ** (-pairs / shape.head_dim)).astype(np.float32)
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies[None, :]
    both = np.concatenate([angles, angles], axis=-1)
    return np.cos(both), np.sin(both)


def _rotate(x: Floats, cosine: Floats, sine: Floats) -> Floats:
    first, second = np.split(x, 2, axis=-1)
    turned: Floats = np.concatenate([-second, first], axis=-1)
    return x * cosine + turned * sine


def _heads(x: Floats, count: int) -> Floats:
    """Turn [positions, count x head_dim] into [count, positions, head_dim]."""
    return x.reshape(len(x), count, -1).transpose(1, 0, 2)


def _attend(
    shape: Shape, parameters: Parameters, prefix: str, x: Floats, cosine: Floats, sine: Floats
) -> tuple[Floats, Floats, Floats]:
    eps, length = shape.rms_norm_eps, len(x)
    q = _heads(x @ parameters.whole(prefix + "q_proj.weight").T, shape.heads)
    k = _heads(x @ parameters.whole(prefix + "k_proj.weight").T, shape.kv_heads)
    v = _heads(x @ parameters.whole(prefix + "v_proj.weight").T, shape.kv_heads)
    q = _rotate(_rms_norm(q, parameters.whole(prefix + "q_norm.weight"), eps), cosine, sine)
    k = _rotate(_rms_norm(k, parameters.whole(prefix + "k_norm.weight"), eps), cosine, sine)
    future = np.triu(np.ones((length, length), dtype=bool), 1)
    scale = np.float32(shape.head_dim**-0.5)
    mixed = np.empty_like(q)
    for head in range(shape.heads):
        shared = head * shape.kv_heads // shape.heads
        scores = np.where(future, np.float32(-np.inf), q[head] @ k[shared].T * scale)
        mixed[head] = _softmax(scores) @ v[shared]
    joined = mixed.transpose(1, 0, 2).reshape(length, -1)
    return joined @ parameters.whole(prefix + "o_proj.weight").T, k, v


def _softmax(x: Floats) -> Floats:
    raised = np.exp(x - np.max(x, axis=-1, keepdims=True))
    weights: Floats = raised / np.sum(raised, axis=-1, keepdims=True, dtype=np.float32)
    return weights


def _swiglu(parameters: Parameters, prefix: str, x: Floats) -> Floats:
    gate = x @ parameters.whole(prefix + "gate_proj.weight").T
    up = x @ parameters.whole(prefix + "up_proj.weight").T
    gate = gate / (np.float32(1) + np.exp(-gate))
    mixed: Floats = (gate * up) @ parameters.whole(prefix + "down_proj.weight").T
    return mixed


def _mix_experts(
    shape: Shape, parameters: Parameters, prefix: str, x: Floats
) -> tuple[Floats, Routes]:
    k = shape.experts_per_token
    weights = _softmax(x @ parameters.whole(prefix + "gate.weight").T)
    # A stable sort of the negated weights puts the lower index first among equals.
    order = np.argsort(-weights, axis=-1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=-1)
    chosen, chosen_weights = order[:, :k], ranked[:, :k]
    if k < shape.experts:
        margin = ranked[:, k - 1] - ranked[:, k]
    else:
        margin = np.ones(len(x), dtype=np.float32)
    if shape.norm_topk_prob:
        chosen_weights = chosen_weights / chosen_weights.sum(axis=-1, keepdims=True)
    mixed = np.zeros_like(x)
    for expert in np.unique(chosen).tolist():
        position, rank = np.nonzero(chosen == expert)
        answer = _swiglu(parameters, f"{prefix}experts.{expert}.", x[position])
        mixed[position] += answer * chosen_weights[position, rank][:, None]
    return mixed, Routes(chosen, chosen_weights, margin)


def _stack_routes(routes: list[Routes]) -> Routes | None:
    if not routes:
        return None
    return Routes(
        np.stack([route.experts for route in routes]),
        np.stack([route.weights for route in routes]),
        np.stack([route.margin for route in routes]),
    )
