"""Boards, and random small Hugging Face folders written by a few lines of their own."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.native_board import Bench, Board, OpenBoard, make_bench

from laneway.adapters.calbin import pack

MakeHfFolder = Callable[..., Path]


def truncate_to_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Keep the upper 16 bits, so that a value is the same in bf16, float32 and our reader."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _draw_tensors(config: dict[str, Any], seed: int) -> dict[str, NDArray[np.float32]]:
    random = np.random.RandomState(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        drawn = random.standard_normal((rows, columns)) / np.sqrt(columns)
        return truncate_to_bf16(drawn.astype(np.float32))

    def norm(length: int) -> NDArray[np.float32]:
        return truncate_to_bf16(random.uniform(0.5, 1.5, length).astype(np.float32))

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden) * np.float32(4)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors[at + "input_layernorm.weight"] = norm(hidden)
        tensors[at + "post_attention_layernorm.weight"] = norm(hidden)
        tensors[at + "self_attn.q_proj.weight"] = matrix(queries, hidden)
        tensors[at + "self_attn.k_proj.weight"] = matrix(keys, hidden)
        tensors[at + "self_attn.v_proj.weight"] = matrix(keys, hidden)
        tensors[at + "self_attn.o_proj.weight"] = matrix(hidden, queries)
        tensors[at + "self_attn.q_norm.weight"] = norm(head_dim)
        tensors[at + "self_attn.k_norm.weight"] = norm(head_dim)
        if "num_experts" not in config:
            widths = {at + "mlp.": config["intermediate_size"]}
        else:
            tensors[at + "mlp.gate.weight"] = matrix(config["num_experts"], hidden)
            widths = {
                f"{at}mlp.experts.{expert}.": config["moe_intermediate_size"]
                for expert in range(config["num_experts"])
            }
        for prefix, width in widths.items():
            tensors[prefix + "gate_proj.weight"] = matrix(width, hidden)
            tensors[prefix + "up_proj.weight"] = matrix(width, hidden)
            tensors[prefix + "down_proj.weight"] = matrix(hidden, width)
    tensors["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden)
    return tensors


def fuse_experts(tensors: dict[str, NDArray[np.float32]], config: dict[str, Any]) -> None:
    """Stack the experts of each layer the way transformers 5 holds them."""
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp.experts."
        gate_up, down = [], []
        for expert in range(config["num_experts"]):
            gate = tensors.pop(f"{at}{expert}.gate_proj.weight")
            up = tensors.pop(f"{at}{expert}.up_proj.weight")
            gate_up.append(np.concatenate([gate, up]))
            down.append(tensors.pop(f"{at}{expert}.down_proj.weight"))
        tensors[at + "gate_up_proj"] = np.stack(gate_up)
        tensors[at + "down_proj"] = np.stack(down)


def write_safetensors(path: Path, tensors: dict[str, NDArray[np.float32]], dtype: str) -> None:
    """Write tensors as BF16 (upper halves), F32 or F16, in the order of their names."""
    header: dict[str, Any] = {}
    raw = b""
    for name, values in sorted(tensors.items()):
        if dtype == "BF16":
            part = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes()
        else:
            part = values.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()
        offsets = [len(raw), len(raw) + len(part)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        raw += part
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw)


def write_hf_folder(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = 4,
    intermediate: int = 24,
    experts: int = 0,
    experts_per_token: int = 2,
    moe_intermediate: int = 12,
    norm_topk_prob: bool = True,
    vocab: int = 40,
    tied: bool = False,
    positions: int = 64,
    dtype: str = "BF16",
    fused: bool = False,
    seed: int = 1,
    config: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    edit: Callable[[dict[str, NDArray[np.float32]]], None] | None = None,
) -> None:
    """Write a random model folder.

    `config` overrides keys of config.json, `drop` removes some, `edit` may change the tensors.
    """
    stated: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if experts else "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
        "hidden_act": "silu",
        "eos_token_id": 0,
    }
    if head_dim is not None:
        stated["head_dim"] = head_dim
    if experts:
        stated |= {
            "num_experts": experts,
            "num_experts_per_tok": experts_per_token,
            "moe_intermediate_size": moe_intermediate,
            "norm_topk_prob": norm_topk_prob,
        }
    tensors = _draw_tensors(stated, seed)
    if fused:
        fuse_experts(tensors, stated)
    if edit is not None:
        edit(tensors)
    stated |= config or {}
    for key in drop:
        del stated[key]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(stated))
    write_safetensors(folder / "model.safetensors", tensors, dtype)
    # Whatever the umask is: files that others may write are refused.
    for path in (folder, *folder.iterdir()):
        path.chmod(path.stat().st_mode & ~0o022)


@pytest.fixture
def make_hf_folder(tmp_path: Path) -> MakeHfFolder:
    """Give `write_hf_folder` into the test's own folder; each call of a test needs another name."""

    def make(name: str = "model", **shape: Any) -> Path:
        write_hf_folder(tmp_path / name, **shape)
        return tmp_path / name

    return make


@pytest.fixture(scope="session")
def packed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack one small mixture of experts for all tests; they change copies of it."""
    folder = tmp_path_factory.mktemp("packed")
    write_hf_folder(folder / "model", experts=3, layers=1)
    pack(folder / "model", folder / "calbin")
    return folder / "calbin"


@pytest.fixture
def packed(packed_once: Path, tmp_path: Path) -> Path:
    """Give a packed calbin that the test may damage."""
    return Path(shutil.copytree(packed_once, tmp_path / "calbin"))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def open_board(bench: Bench) -> Iterator[OpenBoard]:
    with bench.opening() as make:
        yield make


@pytest.fixture
def board(open_board: OpenBoard) -> Board:
    return open_board()
