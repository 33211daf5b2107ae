"""Which model folders are refused, with the words that say why."""

import io
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from laneway.adapters.calbin import check_artifact, pack, read_artifact
from laneway.adapters.golden import load_golden
from laneway.adapters.rooted import open_root
from laneway.engine.errors import ModelError

MODELS = Path(__file__).parents[2] / "models"
NAMES = ("demo-shakespeare", "tiny-dense", "tiny-moe")
MakeHfFolder = Callable[..., Path]
Tensors = dict[str, NDArray[np.float32]]


def copy_model(name: str, folder: Path) -> Path:
    """Copy a model with plain modes, whatever the checkout's umask was."""
    folder.mkdir()
    for file in (MODELS / name).iterdir():
        shutil.copyfile(file, folder / file.name)
        (folder / file.name).chmod(0o644)
    return folder


# Refused folders --------------------------------------------------------------------------------


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[new] = tensors.pop(old)

    return edit


def replace(name: str, value: float, *dims: int) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = np.full(dims, value, dtype=np.float32)

    return edit


def remove(name: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        del tensors[name]

    return edit


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sliding window": (
        {"config": {"use_sliding_window": True, "sliding_window": 32}},
        "use_sliding_window is true: only full attention",
    ),
    "sliding layers": (
        {"config": {"layer_types": ["full_attention", "sliding_attention"]}},
        "layer_types is .*sliding_attention",
    ),
    "dense layers": (
        {"experts": 2, "config": {"mlp_only_layers": [0]}},
        r"mlp_only_layers is \[0\]: layers without experts",
    ),
    "sparse step": (
        {"experts": 2, "config": {"decoder_sparse_step": 2}},
        "decoder_sparse_step is 2",
    ),
    "attention bias": ({"config": {"attention_bias": True}}, "attention_bias is true"),
    "activation": ({"config": {"hidden_act": "gelu"}}, 'hidden_act is "gelu": only silu'),
    "architecture": (
        {"config": {"architectures": ["LlamaForCausalLM"]}},
        r'architectures is \["LlamaForCausalLM"\]',
    ),
    "no architecture": ({"drop": ("architectures", "model_type")}, "architectures is null"),
    "odd architecture": ({"config": {"architectures": [{}]}}, r"architectures is \[\{\}\]"),
    "model type": ({"config": {"model_type": "qwen3_moe"}}, 'model_type is "qwen3_moe"'),
    "rope type": (
        {"config": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}},
        'rope_type is "yarn": only the default',
    ),
    "rope scaling": (
        {"config": {"rope_scaling": {"type": "linear", "factor": 2.0}}},
        'rope_scaling: type is "linear"',
    ),
    "rope factor": (
        {"config": {"rope_parameters": {"rope_theta": 1e4, "factor": 4.0}}},
        "factor is 4.0: only the default",
    ),
    "rope key": (
        {"config": {"rope_parameters": {"rope_theta": 1e4, "a\nb": 1}}},
        r'"a\\nb" is 1: only the default',
    ),
    "two thetas": (
        {"config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}},
        "rope_theta is 1000000.0: elsewhere it is 10000",
    ),
    "no theta": ({"drop": ("rope_theta",)}, "rope_theta is missing"),
    "quantized": ({"config": {"quantization_config": {"bits": 4}}}, "quantization_config is"),
    "vocabulary missing": ({"drop": ("vocab_size",)}, "vocab_size is missing"),
    "vocabulary as text": ({"config": {"vocab_size": "40"}}, 'vocab_size is "40"'),
    "no layers": ({"config": {"num_hidden_layers": 0}}, "num_hidden_layers is 0"),
    "too many layers": ({"config": {"num_hidden_layers": 257}}, "too large .*layers"),
    "fraction": ({"config": {"hidden_size": 16.5}}, "hidden_size is 16.5"),
    "truth": ({"config": {"hidden_size": True}}, "hidden_size is true"),
    "norm eps": ({"config": {"rms_norm_eps": 0}}, "rms_norm_eps is 0"),
    "tied as text": ({"config": {"tie_word_embeddings": "no"}}, 'tie_word_embeddings is "no"'),
    "odd head": ({"head_dim": 3}, "head_dim 3 is odd"),
    "shared heads": ({"heads": 4, "kv_heads": 3}, "heads 4 is no multiple of kv_heads 3"),
    "more chosen than there": (
        {"experts": 2, "experts_per_token": 3},
        "experts_per_token 3 of 2 experts",
    ),
    "two counts": (
        {"experts": 2, "config": {"num_local_experts": 3}},
        "num_local_experts is 3: num_experts says something else",
    ),
    "end token": ({"config": {"eos_token_id": 40}}, "eos_token_id is 40: token ids from 0 to 39"),
    "end tokens": ({"config": {"eos_token_id": [1, "2"]}}, "eos_token_id is"),
    "many end tokens": ({"config": {"eos_token_id": list(range(9))}}, "at most 8 end tokens"),
    "tensor missing": (
        {"edit": remove("model.layers.1.self_attn.k_norm.weight")},
        "tensor model.layers.1.self_attn.k_norm.weight is missing",
    ),
    "head missing": ({"edit": remove("lm_head.weight")}, "tensor lm_head.weight is missing"),
    "expert missing": (
        {"experts": 2, "edit": remove("model.layers.0.mlp.experts.1.up_proj.weight")},
        "tensor model.layers.0.mlp.experts.1.up_proj.weight is missing",
    ),
    "tensor renamed": (
        {"edit": rename("model.norm.weight", "model.final.weight")},
        "tensor model.final.weight is not part of the model",
    ),
    "a layer too many": (
        {"config": {"num_hidden_layers": 1}},
        "tensor model.layers.1.* is not part of the model",
    ),
    "bias stored": (
        {"edit": replace("model.layers.0.self_attn.q_proj.bias", 0.0, 16)},
        "q_proj.bias: projections with a bias",
    ),
    "shape": (
        {"edit": replace("model.norm.weight", 1.0, 17)},
        r"model.norm.weight has the shape \[17\], config.json gives \[16\]",
    ),
    "transposed": (
        {"edit": replace("lm_head.weight", 1.0, 16, 40)},
        r"lm_head.weight has the shape \[16, 40\], config.json gives \[40, 16\]",
    ),
    "not finite": (
        {"edit": replace("model.norm.weight", float("nan"), 16)},
        "model.norm.weight holds values that are not finite",
    ),
    "too large for bf16": (
        {"dtype": "F32", "edit": replace("model.norm.weight", 3.4e38, 16)},
        "model.norm.weight holds values that are not finite",
    ),
    "untied head in a tied model": (
        {"tied": True, "edit": replace("lm_head.weight", 1.0, 40, 16)},
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
    "fused and single": (
        {
            **{"experts": 2, "fused": True},
            "edit": replace("model.layers.0.mlp.experts.0.up_proj.weight", 1.0, 12, 16),
        },
        "experts.0.up_proj.weight is there twice",
    ),
    "fused the other way round": (
        {
            **{"experts": 2, "fused": True},
            "edit": replace("model.layers.0.mlp.experts.gate_up_proj", 1.0, 2, 16, 24),
        },
        r"gate_up_proj has the shape \[2, 16, 24\]",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_folders(
    change: dict[str, Any], message: str, make_hf_folder: MakeHfFolder, tmp_path: Path
) -> None:
    folder = make_hf_folder(**change)
    with pytest.raises(ModelError, match=message) as refusal:
        pack(folder, tmp_path / "calbin")
    assert "\n" not in str(refusal.value)
    # Nothing is left behind, neither the calbin nor the folder it was staged in.
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def break_shards(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def break_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [')


def break_config_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def break_config_bytes(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"model_type": "\xff\xfe"}')


def break_config_size(folder: Path) -> None:
    (folder / "config.json").write_text(" " * (4 << 20) + "{}")


def break_generation(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')


def break_tokenizer_ids(folder: Path) -> None:
    shutil.copyfile(MODELS / "demo-shakespeare" / "tokenizer.json", folder / "tokenizer.json")


def break_header_length(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def break_tail(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0\0")


def break_empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def break_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def break_directory(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def break_link_out(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)


def break_link_loop(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")


def break_link_dangling(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to("nowhere.json")


def break_mode(folder: Path) -> None:
    (folder / "model.safetensors").chmod(0o646)


def break_folder_mode(folder: Path) -> None:
    folder.chmod(0o757)


def break_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def break_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_golden(folder: Path) -> None:
    (folder / "golden.npz").write_bytes(b"PK\x03\x04 no archive")


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (break_shards, "model.safetensors.index.json: the parameters are in several files"),
    (break_shard, "model-00001-of-00002.safetensors: the parameters are in several files"),
    (break_config, "config.json: no JSON object"),
    (break_config_list, "config.json: no JSON object"),
    (break_config_bytes, "config.json: no JSON object"),
    (break_config_size, "config.json: 4194306 bytes, more than"),
    (break_generation, "generation_config.json: no JSON object"),
    (break_tokenizer, "tokenizer.json: no tokenizer"),
    (break_tokenizer_ids, "tokenizer.json: has token id 2047, the vocabulary is 40"),
    (break_header_length, "model.safetensors: damaged or truncated: its header claims"),
    (break_tail, "model.safetensors: damaged or truncated: its tensors end at byte"),
    (break_empty, "model.safetensors: truncated"),
    (break_pipe, "model.safetensors: not a regular file"),
    (break_directory, "model.safetensors: not a regular file"),
    (break_link_out, "model.safetensors: leads out of the model folder to .*name a model root"),
    (break_link_loop, "model.safetensors: cannot be opened"),
    (break_link_dangling, "tokenizer.json: file is missing"),
    (break_mode, r"model.safetensors: writable by others \(mode 0646\); run chmod o-w"),
    (break_folder_mode, "model: the folder is writable by others; run chmod o-w"),
    (break_missing, "model.safetensors: file is missing"),
    (break_no_config, "config.json is missing"),
    (break_golden, "golden.npz: damaged, or no .npz file"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN, ids=[each.__name__ for each, _ in BROKEN])
def test_refuses_broken_files(
    damage: Callable[[Path], None],
    message: str,
    make_hf_folder: MakeHfFolder,
    tmp_path: Path,
) -> None:
    folder = make_hf_folder()
    damage(folder)
    with pytest.raises(ModelError, match=message) as refusal:
        pack(folder, tmp_path / "calbin")
    assert "\n" not in str(refusal.value)
    left = {each.name for each in tmp_path.iterdir()}
    assert left <= {"model", "outside.safetensors"}


def test_refuses_every_truncation(make_hf_folder: MakeHfFolder, tmp_path: Path) -> None:
    folder = make_hf_folder(layers=1)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for length in (1, 7, 8, 9, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="model.safetensors: (damaged|truncated)"):
            pack(folder, tmp_path / "calbin")


def table(*entries: tuple[str, str, list[int], list[int]]) -> dict[str, Any]:
    return {
        name: {"dtype": dtype, "shape": dims, "data_offsets": offsets}
        for name, dtype, dims, offsets in entries
    }


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": {"dtype": "BF16", "shape": [2]}}, "no tensor table"),
        ({"a": 3}, "no tensor table"),
        ([], "no tensor table"),
        (table(("a", "F3", [2], [0, 4])), "unknown dtype F3"),
        (table(("a\x1b\n", "BF16", [2], [0, 4])), r"'a\\x1b\\n' is no tensor name"),
        (table(("", "BF16", [2], [0, 4])), "'' is no tensor name"),
        (table(("a", "BF16", [-2], [0, 4])), r"has the shape \[-2\]"),
        (table(("a", "BF16", [-1, -2], [0, 4])), r"has the shape \[-1, -2\]"),
        (table(("a", "BF16", [3], [0, 4])), "cannot stand at bytes 0 to 4"),
        (table(("a", "BF16", [2], [0, 4]), ("b", "BF16", [2], [2, 6])), "cannot stand"),
        (table(("a", "BF16", [2], [2, 6])), "cannot stand at bytes 2 to 6"),
        (table(("a", "BF16", [2], [4, 0])), "cannot stand"),
        (table(("a", "BF16", [1 << 40, 1 << 40], [0, 4])), "cannot stand"),
        (table(("a", "BF16", [2], [0, 4])), "its tensors end at byte"),
        (table(("a", "I32", [2], [0, 8])), "tensor a is not part of the model"),
    ],
)
def test_refuses_damaged_headers(
    header: Any, message: str, make_hf_folder: MakeHfFolder, tmp_path: Path
) -> None:
    folder = make_hf_folder()
    raw = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    with pytest.raises(ModelError, match=message):
        pack(folder, tmp_path / "calbin")


# Links and modes --------------------------------------------------------------------------------


def test_a_snapshot_of_links_needs_its_model_root(
    make_hf_folder: MakeHfFolder, tmp_path: Path
) -> None:
    blobs = make_hf_folder("blobs")
    snapshot = tmp_path / "snapshots" / "a1b2"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    with pytest.raises(ModelError, match="leads out of the model folder"):
        pack(snapshot, tmp_path / "calbin")
    with pytest.raises(ModelError, match="leads out of the model folder"):
        pack(snapshot, tmp_path / "calbin", model_root=tmp_path / "snapshots")
    manifest = pack(snapshot, tmp_path / "calbin", model_root=tmp_path)
    assert manifest.name == "a1b2"
    (blobs / "config.json").chmod(0o666)
    with pytest.raises(ModelError, match="writable by others"):
        pack(snapshot, tmp_path / "calbin", model_root=tmp_path)


def test_links_inside_the_folder_are_followed(make_hf_folder: MakeHfFolder, tmp_path: Path) -> None:
    folder = make_hf_folder()
    (folder / "model.safetensors").rename(folder / "weights.bin")
    (folder / "model.safetensors").symlink_to("weights.bin")
    (tmp_path / "link").symlink_to(folder)
    pack(tmp_path / "link", tmp_path / "calbin")
    assert not (tmp_path / "calbin" / "model.safetensors").is_symlink()


def test_what_is_written_cannot_be_written_by_others(
    make_hf_folder: MakeHfFolder, tmp_path: Path
) -> None:
    folder = make_hf_folder()
    before = os.umask(0)
    try:
        pack(folder, tmp_path / "calbin")
    finally:
        os.umask(before)
    for path in (tmp_path / "calbin", *(tmp_path / "calbin").iterdir()):
        assert path.stat().st_mode & 0o022 == 0
    check_artifact(tmp_path / "calbin")


@pytest.mark.parametrize("name", ["", ".", "..", "../model/config.json", "a/b", "a\0b"])
def test_only_plain_names_are_opened(
    name: str, make_hf_folder: MakeHfFolder, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="not a plain file name"):
        open_root(make_hf_folder()).read(name, bytes_max=100)


@pytest.mark.parametrize("missing", ["nowhere", "model/config.json", "a\0b"])
def test_a_root_is_a_folder(missing: str, make_hf_folder: MakeHfFolder, tmp_path: Path) -> None:
    make_hf_folder()
    with pytest.raises(ModelError, match="folder"):
        open_root(f"{tmp_path}/{missing}")


# Golden runs ------------------------------------------------------------------------------------


def rewrite_golden(folder: Path, change: Callable[[dict[str, NDArray[Any]]], None]) -> None:
    with np.load(folder / "golden.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}
    change(arrays)
    np.savez(folder / "golden.npz", **arrays)


def with_array(name: str, change: Callable[[NDArray[Any]], Any]) -> Callable[..., None]:
    def edit(arrays: dict[str, NDArray[Any]]) -> None:
        arrays[name] = np.asarray(change(arrays[name]))

    return edit


def put(index: tuple[int, ...], value: float) -> Callable[[NDArray[Any]], NDArray[Any]]:
    def change(array: NDArray[Any]) -> NDArray[Any]:
        array = array.copy()
        array[index] = value
        return array

    return change


def drop_array(name: str) -> Callable[..., None]:
    def edit(arrays: dict[str, NDArray[Any]]) -> None:
        del arrays[name]

    return edit


def add_array(name: str) -> Callable[..., None]:
    def edit(arrays: dict[str, NDArray[Any]]) -> None:
        arrays[name] = np.zeros(3, dtype=np.float32)

    return edit


BAD_GOLDEN: dict[str, tuple[Callable[..., None], str]] = {
    "id too large": (with_array("prompt_1", put((0,), 512)), "prompt_1 has ids outside"),
    "id negative": (with_array("greedy_1", put((0,), -1)), "greedy_1 has ids outside"),
    "ids as floats": (with_array("prompt_0", lambda a: a.astype(np.float32)), "prompt_0 is float"),
    "no ids": (with_array("prompt_0", lambda a: a[:0]), "prompt_0 is"),
    "rows missing": (with_array("logits_2", lambda a: a[:-1]), "logits_2 is float32"),
    "vocabulary": (with_array("logits_2", lambda a: a[:, 1:]), "logits_2 is float32"),
    "float64": (with_array("logits_2", lambda a: a.astype(np.float64)), "logits_2 is float64"),
    "not finite": (with_array("logits_0", put((0, 0), math.inf)), "logits_0 holds"),
    "keys": (with_array("k_0_l3", lambda a: a[:, :, :8]), "k_0_l3 is float32"),
    "experts": (with_array("route_idx_3", put((0, 0, 0), 8)), "route_idx_3 names experts"),
    "route shape": (with_array("route_w_3", lambda a: a[1:]), "route_w_3 is"),
    "other tokens": (with_array("greedy_0", put((3,), 0)), "greedy_0 is not what logits_0 gives"),
    "other margin": (with_array("margin_0", put((3,), 9.0)), "margin_0 is not what logits_0"),
    "array missing": (drop_array("v_1_l0"), "array v_1_l0 is missing"),
    "prompt missing": (drop_array("prompt_3"), "array prompt_3 is missing"),
    "unknown array": (add_array("notes"), "unknown array 'notes'"),
    "unknown layer": (add_array("k_0_l1"), "unknown array k_0_l1"),
    "a gap": (add_array("prompt_5"), "numbered 0 to"),
    "no arrays": (lambda arrays: arrays.clear(), "numbered 0 to"),
    "objects": (with_array("margin_0", lambda a: np.array([None])), "damaged"),
    "text": (with_array("margin_0", lambda a: np.array(["a"])), "values of type"),
}


@pytest.mark.parametrize(("change", "message"), BAD_GOLDEN.values(), ids=BAD_GOLDEN.keys())
def test_refuses_unsound_golden_runs(
    change: Callable[..., None], message: str, tmp_path: Path
) -> None:
    folder = copy_model("tiny-moe", tmp_path / "model")
    rewrite_golden(folder, change)
    with pytest.raises(ModelError, match=message):
        pack(folder, tmp_path / "calbin")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_golden_bytes_are_refused_or_harmless(
    save: Callable[..., None], make_hf_folder: MakeHfFolder, packed_once: Path
) -> None:
    folder = make_hf_folder()
    shape = read_artifact(packed_once).manifest.shape
    with np.load(packed_once / "golden.npz") as stored:
        save(folder / "golden.npz", **{name: stored[name] for name in stored.files})
    whole = (folder / "golden.npz").read_bytes()
    load_golden(open_root(folder), shape)
    refused = 0
    for at in range(0, len(whole), len(whole) // 61):
        changed = whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]
        (folder / "golden.npz").write_bytes(changed)
        try:
            load_golden(open_root(folder), shape)
        except ModelError:
            refused += 1
    # The zip's own checksums find nearly all; no other exception came out.
    assert refused > 50


def test_an_array_header_cannot_ask_for_more_than_it_brings(tmp_path: Path) -> None:
    folder = copy_model("tiny-dense", tmp_path / "model")
    plain = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)}
    np.lib.format.write_array_header_1_0(plain, header)
    with zipfile.ZipFile(folder / "golden.npz", "a") as archive:
        archive.writestr("logits_4.npy", plain.getvalue() + bytes(8))
    with pytest.raises(ModelError, match="golden.npz: damaged"):
        pack(folder, tmp_path / "calbin")


def test_golden_runs_that_do_not_fit_the_context_are_computed_anew(tmp_path: Path) -> None:
    told: list[str] = []
    manifest = pack(MODELS / "tiny-moe", tmp_path / "calbin", context=20, progress=told.append)
    assert "golden runs need 91 positions, the context is 20" in told
    golden = load_golden(open_root(tmp_path / "calbin"), manifest.shape, context=20)
    assert golden.positions_max == 20
    check_artifact(tmp_path / "calbin")
