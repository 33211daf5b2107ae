"""The float32 reference against torch's golden numbers, and against float64 loops written here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from laneway.adapters.comparing import LogitErrors, compare_logits, routing_equal
from laneway.adapters.golden import Golden, GoldenRun, encode_golden, load_golden
from laneway.adapters.huggingface import read_config
from laneway.adapters.manifest import GOLDEN_NAME, PARAMETERS_NAME, Shape
from laneway.adapters.reference import compute_forward, continue_greedily, make_golden
from laneway.adapters.rooted import open_root
from laneway.adapters.tensors import StoredParameters, read_header
from laneway.engine.errors import ModelError

MODELS = Path(__file__).parents[2] / "models"
NAMES = ("demo-shakespeare", "tiny-dense", "tiny-moe")
MakeHfFolder = Callable[..., Path]


class Loaded:
    """A model folder opened for the reference; the file stays open as long as the test needs it."""

    def __init__(self, folder: Path) -> None:
        root = open_root(folder)
        self.shape: Shape = read_config(root).shape
        self.file = root.open(PARAMETERS_NAME, bytes_max=1 << 30)
        entries = read_header(self.file, path=folder)
        self.parameters = StoredParameters(self.file, entries, path=folder)


@pytest.fixture
def load() -> Any:
    opened: list[Loaded] = []

    def open_folder(folder: Path) -> Loaded:
        opened.append(Loaded(folder))
        return opened[-1]

    yield open_folder
    for each in opened:
        each.file.close()


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_torch(name: str, load: Callable[[Path], Loaded]) -> None:
    model = load(MODELS / name)
    golden = load_golden(open_root(MODELS / name), model.shape, context=512)
    assert len(golden.runs) == 4
    for run in golden.runs:
        forward = compute_forward(model.shape, model.parameters, run.tokens)
        errors = compare_logits(run, forward.logits)
        assert errors.max_abs_logit_error < 2e-5
        assert errors.rows == run.row_count
        assert errors.tokens_equal == errors.tokens_compared > 0.9 * errors.rows
        for layer in (0, model.shape.layers - 1):
            assert np.max(np.abs(forward.keys[layer] - run.keys[layer])) < 2e-5
            assert np.max(np.abs(forward.values[layer] - run.values[layer])) < 2e-5
        if model.shape.experts:
            assert forward.routes is not None
            assert run.route_weights is not None and run.route_margin is not None
            assert routing_equal(run, forward.routes.experts)
            assert np.max(np.abs(forward.routes.margin - run.route_margin)) < 1e-5
            assert np.max(np.abs(forward.routes.weights - run.route_weights)) < 1e-5


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe"])
def test_continues_as_torch_does(name: str, load: Callable[[Path], Loaded]) -> None:
    model = load(MODELS / name)
    run = load_golden(open_root(MODELS / name), model.shape).runs[1]
    # The smallest margin of these runs is 2e-3, a hundred times the error that is allowed above.
    assert float(run.margin.min()) > 1e-3
    greedy = continue_greedily(model.shape, model.parameters, run.prompt, count=12)
    assert tuple(greedy) == run.greedy[:12]


SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense tied": {"tied": True, "layers": 3},
    "one head": {"heads": 1, "kv_heads": 1, "head_dim": 2},
    "wide heads": {"heads": 3, "kv_heads": 3, "head_dim": 8, "hidden": 12},
    "shared by six": {"heads": 6, "kv_heads": 1, "head_dim": 6, "hidden": 20, "vocab": 33},
    "experts": {"experts": 5, "experts_per_token": 2},
    "experts tied, weights as they are": {
        **{"experts": 4, "experts_per_token": 3, "norm_topk_prob": False, "tied": True}
    },
    "all experts": {"experts": 3, "experts_per_token": 3, "layers": 1},
    "head_dim derived": {"head_dim": None, "hidden": 24, "heads": 4},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_agrees_with_float64_loops(
    shape: dict[str, Any], make_hf_folder: MakeHfFolder, load: Callable[[Path], Loaded]
) -> None:
    model = load(make_hf_folder(seed=7, **shape))
    tokens = [int(n) for n in np.random.RandomState(3).randint(0, model.shape.vocab, 11)]
    forward = compute_forward(model.shape, model.parameters, tokens)
    expected = _decode_in_float64(model.shape, model.parameters, tokens)
    assert forward.logits.dtype == np.float32
    assert np.max(np.abs(forward.logits - expected)) < 1e-4
    # The numbers are not all alike: a wrong position or head would show.
    assert np.std(expected) > 0.1


def _decode_in_float64(
    shape: Shape, parameters: StoredParameters, tokens: list[int]
) -> NDArray[np.float64]:
    """One token after the other, with KV kept, in float64: shares no line with the reference."""

    def get(name: str) -> NDArray[np.float64]:
        return parameters.whole(name).astype(np.float64)

    def norm(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        scale: float = np.sqrt(np.dot(x, x) / len(x) + shape.rms_norm_eps)
        return x / scale * get(name)

    def turn(x: NDArray[np.float64], position: int) -> NDArray[np.float64]:
        half = shape.head_dim // 2
        turned = np.empty_like(x)
        for i in range(half):
            angle = position * shape.rope_theta ** (-2 * i / shape.head_dim)
            a, b = x[i], x[i + half]
            turned[i] = a * np.cos(angle) - b * np.sin(angle)
            turned[i + half] = b * np.cos(angle) + a * np.sin(angle)
        return turned

    def mlp(x: NDArray[np.float64], prefix: str) -> NDArray[np.float64]:
        gate = get(prefix + "gate_proj.weight") @ x
        hidden = gate / (1 + np.exp(-gate)) * (get(prefix + "up_proj.weight") @ x)
        mixed: NDArray[np.float64] = get(prefix + "down_proj.weight") @ hidden
        return mixed

    kept: dict[tuple[int, int], list[tuple[NDArray[np.float64], NDArray[np.float64]]]] = {}
    rows = []
    for position, token in enumerate(tokens):
        x = get("model.embed_tokens.weight")[token]
        for layer in range(shape.layers):
            at = f"model.layers.{layer}."
            y = norm(x, at + "input_layernorm.weight")
            q = (get(at + "self_attn.q_proj.weight") @ y).reshape(shape.heads, -1)
            k = (get(at + "self_attn.k_proj.weight") @ y).reshape(shape.kv_heads, -1)
            v = (get(at + "self_attn.v_proj.weight") @ y).reshape(shape.kv_heads, -1)
            for head in range(shape.kv_heads):
                key = turn(norm(k[head], at + "self_attn.k_norm.weight"), position)
                kept.setdefault((layer, head), []).append((key, v[head]))
            mixed = []
            for head in range(shape.heads):
                query = turn(norm(q[head], at + "self_attn.q_norm.weight"), position)
                past = kept[layer, head // (shape.heads // shape.kv_heads)]
                scores = [float(query @ key) / shape.head_dim**0.5 for key, _ in past]
                weights = np.exp(np.array(scores) - max(scores))
                weights /= weights.sum()
                mixed.append(sum(w * value for w, (_, value) in zip(weights, past, strict=True)))
            x = x + get(at + "self_attn.o_proj.weight") @ np.concatenate(mixed)
            y = norm(x, at + "post_attention_layernorm.weight")
            if shape.experts == 0:
                x = x + mlp(y, at + "mlp.")
                continue
            router = np.exp(get(at + "mlp.gate.weight") @ y)
            router /= router.sum()
            ranked = sorted((-weight, expert) for expert, weight in enumerate(router.tolist()))
            chosen = [expert for _, expert in ranked[: shape.experts_per_token]]
            total = sum(router[e] for e in chosen) if shape.norm_topk_prob else 1.0
            x = x + sum(router[e] / total * mlp(y, f"{at}mlp.experts.{e}.") for e in chosen)
        output = "model.embed_tokens.weight" if shape.tied_head else "lm_head.weight"
        rows.append(get(output) @ norm(x, "model.norm.weight"))
    return np.stack(rows)


def test_later_tokens_do_not_change_earlier_rows(load: Callable[[Path], Loaded]) -> None:
    model = load(MODELS / "tiny-moe")
    tokens = list(range(20, 32))
    whole = compute_forward(model.shape, model.parameters, tokens)
    for length in (1, 5, 11):
        part = compute_forward(model.shape, model.parameters, tokens[:length])
        assert np.max(np.abs(whole.logits[:length] - part.logits)) < 2e-5
    tail = compute_forward(model.shape, model.parameters, tokens, first_row=9)
    assert tail.logits.shape == (3, 512)
    assert np.max(np.abs(whole.logits[9:] - tail.logits)) < 2e-5


def test_ties_go_to_the_lowest(
    make_hf_folder: MakeHfFolder, load: Callable[[Path], Loaded]
) -> None:
    def flatten(tensors: dict[str, NDArray[np.float32]]) -> None:
        for name in tensors:
            if name == "lm_head.weight" or name.endswith("mlp.gate.weight"):
                tensors[name] = np.zeros_like(tensors[name])

    model = load(make_hf_folder(experts=6, edit=flatten))
    forward = compute_forward(model.shape, model.parameters, [3, 1, 2])
    assert forward.routes is not None
    assert forward.routes.experts.tolist() == [[[0, 1]] * 3] * 2
    assert np.max(np.abs(forward.routes.weights - 0.5)) == 0
    assert continue_greedily(model.shape, model.parameters, [3], count=2) == [0, 0]


def test_refuses_logits_that_are_not_finite(
    make_hf_folder: MakeHfFolder, load: Callable[[Path], Loaded]
) -> None:
    def blow_up(tensors: dict[str, NDArray[np.float32]]) -> None:
        tensors["lm_head.weight"] = np.full_like(tensors["lm_head.weight"], 2.0**127)

    model = load(make_hf_folder(edit=blow_up))
    with pytest.raises(ModelError, match="not finite"):
        compute_forward(model.shape, model.parameters, [1, 2, 3])


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("context", [1, 2, 9, 64])
def test_makes_golden_runs_that_load(
    experts: int,
    context: int,
    make_hf_folder: MakeHfFolder,
    load: Callable[[Path], Loaded],
) -> None:
    folder = make_hf_folder(experts=experts, layers=1)
    model = load(folder)
    golden = make_golden(model.shape, model.parameters, context=context, parameter_count=1)
    again = make_golden(model.shape, model.parameters, context=context, parameter_count=1)
    assert encode_golden(golden) == encode_golden(again)
    (folder / GOLDEN_NAME).write_bytes(encode_golden(golden))
    loaded = load_golden(open_root(folder), model.shape, context=context)
    assert [run.prompt for run in loaded.runs] == [run.prompt for run in golden.runs]
    assert len(loaded.runs) == 4 and loaded.positions_max <= context
    for run, made in zip(loaded.runs, golden.runs, strict=True):
        assert np.array_equal(run.logits, made.logits)
        assert len(run.tokens) == run.row_count == len(run.logits)
        expected = _decode_in_float64(model.shape, model.parameters, list(run.tokens))
        assert np.max(np.abs(run.logits - expected)) < 1e-4
    # numpy's own reader finds the documented names.
    with np.load(folder / GOLDEN_NAME) as arrays:
        routes = {"route_idx_0", "route_w_0", "route_margin_0"} if experts else set()
        plain = {"prompt_0", "greedy_0", "logits_0", "margin_0", "k_0_l0", "v_0_l0"}
        assert {name for name in arrays.files if "_0" in name} == plain | routes


def make_run(logits: list[list[float]]) -> GoldenRun:
    """A run of one prompt token whose rows are given; nothing else of it matters here."""
    rows = np.array(logits, dtype=np.float32)
    ranked = np.sort(rows, axis=-1)
    return GoldenRun(
        prompt=(0,),
        greedy=tuple(np.argmax(rows, axis=-1).tolist()),
        logits=rows,
        margin=ranked[:, -1] - ranked[:, -2],
        keys={},
        values={},
        route_experts=np.array([[[2, 0], [1, 2]]], dtype=np.int32),
        route_weights=np.full((1, 2, 2), 0.5, dtype=np.float32),
        route_margin=np.array([[0.5, 5e-5]], dtype=np.float32),
    )


def test_compares_tokens_only_where_the_margin_decides() -> None:
    run = make_run([[1.0, 2.0, 0.0], [1.0, 1.0005, 0.0], [5.0, 5.02, 1.0]])
    # Row 0 is decided and wrong, row 1 is too close to decide, row 2 is decided and right.
    device = [[2.5, 2.0, 0.0], [1.0, 0.9, 0.0], [5.0, 5.02, 1.25]]
    assert compare_logits(run, device) == LogitErrors(
        max_abs_logit_error=1.5, rows=3, tokens_equal=1, tokens_compared=2
    )
    # In bf16 the step at 2.0 is 2^-6, at 1.0005 2^-7, at 5.02 2^-5: only row 0 is decided.
    assert compare_logits(run, device, bf16=True).tokens_compared == 1
    assert compare_logits(run, device[:1]).rows == 1
    for wrong in ([], [[1.0, 2.0]], device + device, [1.0, 2.0, 3.0]):
        with pytest.raises(ModelError):
            compare_logits(run, wrong)


def test_bf16_margin_is_one_step_of_the_top_logit() -> None:
    # 3.0 lies between 2 and 4, where bf16 numbers are 2^-6 apart; -3.0 likewise.
    for top in (3.0, -3.0):
        above = make_run([[top, top - 1.01 / 64]])
        below = make_run([[top, top - 0.99 / 64]])
        assert compare_logits(above, above.logits, bf16=True).tokens_compared == 1
        assert compare_logits(below, below.logits, bf16=True).tokens_compared == 0


def test_compares_routing_as_sets_where_the_margin_decides() -> None:
    run = make_run([[1.0, 2.0], [1.0, 3.0]])
    assert routing_equal(run, [[[0, 2], [1, 2]]])
    assert routing_equal(run, [[[2, 0], [0, 1]]])  # position 1 is not decided
    assert not routing_equal(run, [[[2, 1], [1, 2]]])
    assert routing_equal(run, [[[0, 2]]])
    with pytest.raises(ModelError):
        routing_equal(run, [[[0, 2, 1]]])
    with pytest.raises(ModelError, match="dense"):
        routing_equal(attrs.evolve(run, route_experts=None, route_margin=None), [[[0, 2]]])


def test_golden_tells_its_longest_run() -> None:
    short, long = make_run([[1.0, 2.0]]), make_run([[1.0, 2.0], [1.0, 3.0]])
    assert Golden((short, long)).positions_max == 2
    assert long.tokens == (0, 1)
