"""Packing: what a calbin holds, what is refused and why, and that nothing half-written stays."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from laneway.adapters.calbin import check_artifact, pack, prepare, read_artifact
from laneway.adapters.manifest import Layout, Shape
from laneway.adapters.parameters import parameter_bytes, parameter_shapes, place_bytes
from laneway.adapters.tensors import round_to_bf16, widen_bf16
from laneway.engine.errors import ModelError

MODELS = Path(__file__).parents[2] / "models"
NAMES = ("demo-shakespeare", "tiny-dense", "tiny-moe")
MakeHfFolder = Callable[..., Path]
Tensors = dict[str, NDArray[np.float32]]


def read_tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Read a file with the safetensors library."""
    found = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    return {name: (at["dtype"], list(at["shape"]), bytes(at["data"])) for name, at in found}


# What is packed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_packs_the_models(name: str, tmp_path: Path) -> None:
    manifest = pack(MODELS / name, tmp_path / "calbin")
    artifact = check_artifact(tmp_path / "calbin")
    assert artifact.manifest == manifest
    raw = (tmp_path / "calbin" / "manifest.json").read_bytes()
    assert artifact.sha256 == hashlib.sha256(raw).hexdigest()
    assert manifest.name == name
    assert manifest.compiler == "laneway-pack 0.1.0"
    assert (manifest.context, manifest.lanes, manifest.layout) == (512, 8, "tp2")
    # The parameters are the same bytes under the same names.
    packed = read_tensors(tmp_path / "calbin" / "model.safetensors")
    assert packed == read_tensors(MODELS / name / "model.safetensors")
    # Golden runs and tokenizer are copied as they are; the hashes are those of the files.
    for file, record in manifest.files.items():
        content = (tmp_path / "calbin" / file).read_bytes()
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (record.sha256, record.bytes)
        if file != "model.safetensors":
            assert content == (MODELS / name / file).read_bytes()
    assert ("tokenizer.json" in manifest.files) == (name == "demo-shakespeare")
    assert {file.name for file in (tmp_path / "calbin").iterdir()} == {
        "manifest.json",
        *manifest.files,
    }


def test_manifest_has_the_documented_numbers(tmp_path: Path) -> None:
    pack(MODELS / "demo-shakespeare", tmp_path / "calbin", batch=(4, 1, 16, 8, 4))
    stated = json.loads((tmp_path / "calbin" / "manifest.json").read_text())
    assert stated["shape"] == {
        **{"layers": 5, "hidden": 160, "heads": 5, "kv_heads": 1, "head_dim": 32},
        **{"intermediate": 768, "experts": 8, "experts_per_token": 2, "moe_intermediate": 96},
        **{"norm_topk_prob": True, "vocab": 2048, "rms_norm_eps": 1e-06, "rope_theta": 10000.0},
        "tied_head": True,
    }
    # 5 layers x 2 x 1 head x 32 x 2 bytes, and 512 positions of that.
    assert stated["kv"] == {"bytes_per_token": 640, "bytes_per_lane": 327680}
    assert stated["lanes"] == 32
    assert stated["bytes"]["kv"] == [32 * 327680 // 2] * 2
    assert stated["eos_token_ids"] == [0]
    assert stated["needs"] == {"runtime": "0.1", "driver": "0.1", "firmware": "0.1"}
    assert stated["chips"] == {"count": 2, "mask": 3}
    assert [
        (each["name"], each["task"], each["max_batch"], each["max_tokens"])
        for each in stated["submodels"]
    ] == [
        *[(f"prefill_b{n}", "prefill", n, 512) for n in (1, 4, 8, 16)],
        *[(f"decode_b{n}", "decode", n, 1) for n in (1, 4, 8, 16)],
    ]
    assert [each["incremental_prefill"] for each in stated["submodels"]] == [True] * 4 + [False] * 4


def test_equal_folders_give_equal_artifacts(make_hf_folder: MakeHfFolder, tmp_path: Path) -> None:
    # Without golden.npz, so that it is computed each time.
    first, second = make_hf_folder("a", experts=3), make_hf_folder("b", experts=3)
    pack(first, tmp_path / "one", name="same")
    pack(second, tmp_path / "two", name="same")
    one, two = read_artifact(tmp_path / "one"), read_artifact(tmp_path / "two")
    assert one.sha256 == two.sha256
    pack(second, tmp_path / "three", name="other")
    assert read_artifact(tmp_path / "three").sha256 != one.sha256


SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense tied": {"tied": True, "layers": 1},
    "one head": {"heads": 1, "kv_heads": 1, "head_dim": 2, "vocab": 3},
    "three of three heads": {"heads": 3, "kv_heads": 3, "head_dim": 8, "hidden": 12},
    "experts": {"experts": 5, "experts_per_token": 2, "layers": 3},
    "experts tied": {"experts": 4, "experts_per_token": 3, "norm_topk_prob": False, "tied": True},
    "head_dim derived": {"head_dim": None, "hidden": 24, "heads": 4},
    "one token": {"vocab": 1, "layers": 1},
    "two positions": {"positions": 2},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_packs_random_models(
    shape: dict[str, Any], make_hf_folder: MakeHfFolder, tmp_path: Path
) -> None:
    folder = make_hf_folder(**shape)
    manifest = pack(folder, tmp_path / "calbin")
    assert check_artifact(tmp_path / "calbin").manifest == manifest
    packed = read_tensors(tmp_path / "calbin" / "model.safetensors")
    assert packed == read_tensors(folder / "model.safetensors")
    assert list(manifest.files) == ["model.safetensors", "golden.npz"]
    total = sum(len(data) for _, _, data in packed.values())
    assert parameter_bytes(manifest.shape) == total == sum(manifest.bytes.params)


def test_names_every_parameter_once() -> None:
    with prepare(MODELS / "tiny-dense") as packed:
        shape = read_artifact(packed).manifest.shape
    assert set(parameter_shapes(shape)) == set(
        read_tensors(MODELS / "tiny-dense" / "model.safetensors")
    )


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_rounds_other_floats_and_says_so(
    dtype: str, make_hf_folder: MakeHfFolder, tmp_path: Path
) -> None:
    def put(tensors: Tensors) -> None:
        # 1 + 2^-8 and 1 + 3 x 2^-8 lie half-way between bf16 numbers; the even one is nearest.
        values = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9, -1 - 2**-8 - 2**-10, 0.0, -2.0]
        tensors["model.norm.weight"][: len(values)] = values

    told: list[str] = []
    folder = make_hf_folder(dtype=dtype, edit=put)
    manifest = pack(folder, tmp_path / "calbin", progress=told.append)
    assert manifest.compiler == f"laneway-pack 0.1.0 ({dtype} rounded to BF16)"
    assert f"parameters rounded from {dtype} to BF16" in told
    dtype_packed, _, raw = read_tensors(tmp_path / "calbin" / "model.safetensors")[
        "model.norm.weight"
    ]
    assert dtype_packed == "BF16"
    assert np.frombuffer(raw, "<u2")[:6].tolist() == [
        *[0x3F80, 0x3F82, 0x3F80, 0xBF81, 0x0000, 0xC000]
    ]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
@settings(derandomize=True, deadline=None)
def test_rounding_is_to_the_nearest_even(values: list[float]) -> None:
    bits = round_to_bf16(np.array(values, dtype=np.float32))
    for value, rounded in zip(values, bits.tolist(), strict=True):
        if math.isinf(value):
            assert rounded == (0x7F80 if value > 0 else 0xFF80)
            continue
        # Neighbours by magnitude: truncation and the next number; 0x7F80 stands for 2^128.
        low = int(np.float32(abs(value)).view(np.uint32)) >> 16
        at = [float(widen_bf16(np.array([low], np.uint16))[0]), 2.0**128]
        if low + 1 < 0x7F80:
            at[1] = float(widen_bf16(np.array([low + 1], np.uint16))[0])
        gap = [abs(value) - at[0], at[1] - abs(value)]
        up = gap[1] < gap[0] or (gap[1] == gap[0] and low % 2 == 1)
        assert rounded & 0x7FFF == low + up
        assert rounded >> 15 == (math.copysign(1, value) < 0)
    assert bool((round_to_bf16(np.array([np.nan], np.float32)) & 0x7FFF > 0x7F80).all())


def test_fused_experts_are_the_same_model(make_hf_folder: MakeHfFolder, tmp_path: Path) -> None:
    # hidden = 2 x width: the gate and up tensor alone would fit its transposed form too.
    shape = {"experts": 3, "hidden": 24, "heads": 4, "moe_intermediate": 12}
    plain = pack(make_hf_folder("plain", **shape), tmp_path / "one", name="same")
    fused = pack(make_hf_folder("fused", fused=True, **shape), tmp_path / "two", name="same")
    assert fused == plain


def test_accepts_what_files_in_the_wild_have(make_hf_folder: MakeHfFolder, tmp_path: Path) -> None:
    def store_extras(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)

    plain = make_hf_folder("plain", tied=True, experts=2)
    wild = make_hf_folder(
        "wild",
        tied=True,
        experts=2,
        edit=store_extras,
        drop=("num_experts", "rope_theta", "hidden_act"),
        config={
            "num_local_experts": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "layer_types": ["full_attention"] * 2,
            "attention_bias": False,
            "rope_scaling": None,
            "torch_dtype": "bfloat16",
        },
    )
    one = pack(plain, tmp_path / "one", name="same")
    assert pack(wild, tmp_path / "two", name="same") == one


@pytest.mark.parametrize(
    ("stated", "generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 3], None, (7, 3)),
        (None, None, ()),
        (None, 5, (5,)),
        (7, [7, 2], (7, 2)),
        ([], None, ()),
    ],
)
def test_end_tokens(
    stated: object,
    generation: object,
    expected: tuple[int, ...],
    make_hf_folder: MakeHfFolder,
    tmp_path: Path,
) -> None:
    folder = make_hf_folder(config={"eos_token_id": stated})
    if generation is not None:
        path = folder / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": generation, "do_sample": True}))
    assert pack(folder, tmp_path / "calbin").eos_token_ids == expected


# Bytes per chip ---------------------------------------------------------------------------------

# tiny-moe: embedding and head have 512 x 64 x 2 = 65,536 each; a layer has 24,896 of attention and
# norms, 1,024 of router and 8 experts of 18,432; the final norm 128. Together 824,704 bytes.
# A token has 512 bytes of KV.
TINY_MOE_PARAMS: dict[str, tuple[int, ...]] = {
    "single": (824704,),
    "tp2": (65536 + 379584, 379584),
    "pp2": (65536 + 2 * 173376, 2 * 173376 + 128 + 65536),
    "ep2": (234880 + 294912, 234880 + 294912),
    "tpep": (65536 + 84672 + 294912, 84672 + 294912),
}


@pytest.mark.parametrize("layout", TINY_MOE_PARAMS)
def test_bytes_per_chip(layout: str, tmp_path: Path) -> None:
    manifest = pack(MODELS / "tiny-moe", tmp_path / "calbin", layout=layout)
    check_artifact(tmp_path / "calbin")
    chips = 1 if layout == "single" else 2
    assert manifest.chips.count == chips
    assert manifest.bytes.params == TINY_MOE_PARAMS[layout]
    assert manifest.bytes.kv == (8 * 512 * 512 // chips,) * chips
    assert manifest.bytes.other == (0,) * chips
    assert len(manifest.bytes.workspace) == chips and min(manifest.bytes.workspace) > 0


def test_odd_halves_lie_on_chip_0(tmp_path: Path) -> None:
    # 5 layers, 9 lanes of 327,680 bytes, one KV head.
    lanes = 9 * 327680
    kv = {
        layout: pack(
            MODELS / "demo-shakespeare", tmp_path / layout, layout=layout, lanes=9
        ).bytes.kv
        for layout in ("single", "tp2", "ep2", "pp2", "tpep")
    }
    assert kv == {
        "single": (lanes,),
        "tp2": (lanes // 2, lanes // 2),
        "tpep": (lanes // 2, lanes // 2),
        "ep2": (5 * 327680, 4 * 327680),
        "pp2": (lanes * 3 // 5, lanes * 2 // 5),
    }


@pytest.mark.parametrize("layout", ["ep2", "tpep"])
def test_the_odd_expert_lies_on_chip_0(
    layout: str, make_hf_folder: MakeHfFolder, tmp_path: Path
) -> None:
    folder = make_hf_folder(experts=3, tied=True, layers=1)
    params = pack(folder, tmp_path / "calbin", layout=layout).bytes.params
    # One expert of 3 x 12 x 16 parameters more; under tpep also the whole embedding, 40 x 16.
    assert params[0] - params[1] == 2 * 3 * 12 * 16 + (2 * 40 * 16 if layout == "tpep" else 0)


counts = st.integers(1, 7)


@given(
    layers=counts,
    hidden=st.integers(1, 33),
    kv_heads=counts,
    shared=st.integers(1, 3),
    half_dim=st.integers(1, 5),
    experts=st.integers(0, 9),
    width=st.integers(1, 13),
    vocab=st.integers(1, 50),
    tied=st.booleans(),
    lanes=st.integers(1, 17),
)
@settings(derandomize=True, deadline=None)
def test_bytes_add_up_exactly(
    *,
    layers: int,
    hidden: int,
    kv_heads: int,
    shared: int,
    half_dim: int,
    experts: int,
    width: int,
    vocab: int,
    tied: bool,
    lanes: int,
) -> None:
    shape = Shape(
        layers=layers,
        hidden=hidden,
        heads=kv_heads * shared,
        kv_heads=kv_heads,
        head_dim=2 * half_dim,
        intermediate=width,
        experts=experts,
        experts_per_token=min(experts, 2),
        moe_intermediate=width if experts else 0,
        norm_topk_prob=True,
        vocab=vocab,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tied_head=tied,
    )
    table = hidden * vocab * 2
    split_experts = 2 * layers * experts * 3 * hidden * width
    queries, keys = shape.heads * shape.head_dim, kv_heads * shape.head_dim
    attention = 2 * hidden * (queries + keys) + 2 * hidden + 2 * shape.head_dim
    mlp = 3 * hidden * width if not experts else experts * hidden
    total = table * (1 if tied else 2) + 2 * layers * (attention + mlp) + split_experts + 2 * hidden
    assert parameter_bytes(shape) == total
    twice = {"single": 0, "tp2": 0, "tpep": 0, "pp2": table if tied else 0}
    twice["ep2"] = total - split_experts
    layouts: list[Layout] = ["single", "tp2", "pp2", "ep2", "tpep"]
    for layout in layouts:
        placed = place_bytes(shape, layout, context=3, lanes=lanes, batch_max=1)
        assert sum(placed.params) == total + twice[layout]
        assert sum(placed.kv) == lanes * 3 * layers * 2 * keys * 2
        assert all(each % 2 == 0 for each in (*placed.params, *placed.kv))


# Options ----------------------------------------------------------------------------------------


def test_options(make_hf_folder: MakeHfFolder, tmp_path: Path) -> None:
    manifest = pack(
        make_hf_folder(),
        tmp_path / "calbin",
        batch=[2],
        lanes=2,
        context=33,
        chips=1,
        lane_rule="mask_csr",
        fixed_rows=True,
        kv_layout="auto",
        name="mine.v2",
    )
    assert (manifest.lanes, manifest.context, manifest.layout) == (2, 33, "single")
    assert (manifest.chips.count, manifest.chips.mask) == (1, 1)
    assert (manifest.lane_rule, manifest.kv_layout) == ("mask_csr", "auto")
    assert manifest.fixed_rows and read_artifact(tmp_path / "calbin").manifest == manifest
    assert manifest.name == "mine.v2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": (8,), "lanes": 7}, "lanes 7: fewer than the largest batch, 8"),
        ({"batch": ()}, r"batch \[\]"),
        ({"batch": (0, 1)}, r"batch \[0, 1\]"),
        ({"batch": tuple(range(1, 10))}, "1 to 8 sizes"),
        ({"lanes": 0}, "lanes 0"),
        ({"lanes": 65}, "lanes 65: the simulated board has at most 64"),
        ({"context": 0}, "context 0"),
        ({"context": 65}, "context 65: the model has 1 to 64 positions"),
        ({"chips": 3}, "chips 3: layout tp2 is for 2"),
        ({"chips": 1, "layout": "tp2"}, "chips 1: layout tp2 is for 2"),
        ({"chips": 2, "layout": "single"}, "chips 2: layout single is for 1"),
        ({"layout": "dp4"}, "layout 'dp4': one of single, tp2"),
        ({"layout": "ep2"}, "layout ep2: splits experts, the model is dense"),
        ({"layout": "tpep"}, "layout tpep: splits experts, the model is dense"),
        ({"lane_rule": "none"}, "lane_rule 'none'"),
        ({"kv_layout": "none"}, "kv_layout 'none'"),
        ({"name": "a/b"}, "name 'a/b'"),
        ({"name": ""}, "name ''"),
    ],
)
def test_refuses_options(
    options: dict[str, Any], message: str, make_hf_folder: MakeHfFolder, tmp_path: Path
) -> None:
    folder = make_hf_folder()
    with pytest.raises(ModelError, match=message):
        pack(folder, tmp_path / "calbin", **options)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


# Destination ------------------------------------------------------------------------------------


def test_replaces_an_older_calbin_and_nothing_else(
    make_hf_folder: MakeHfFolder, tmp_path: Path
) -> None:
    folder, target = make_hf_folder(), tmp_path / "deep" / "calbin"
    first = pack(folder, target)
    second = pack(folder, target, lanes=9)
    assert first != second == check_artifact(target).manifest
    assert [each.name for each in target.parent.iterdir()] == ["calbin"]
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="exists and is no calbin of laneway"):
        pack(folder, target)
    assert (target / "notes.txt").read_text() == "mine"
    assert read_artifact(target).manifest == second


def test_refuses_other_destinations(make_hf_folder: MakeHfFolder, tmp_path: Path) -> None:
    folder = make_hf_folder()
    other = tmp_path / "other"
    other.mkdir()
    (other / "manifest.json").write_text('{"format": "something else"}')
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for target in (folder, other, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(ModelError, match="exists and is no calbin of laneway"):
            pack(folder, target)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 40
    assert {each.name for each in tmp_path.iterdir()} == {"model", "other", "file", "link"}
    with pytest.raises(ModelError, match="cannot be written"):
        pack(folder, tmp_path / "file" / "calbin")


def test_an_empty_folder_may_be_the_destination(
    make_hf_folder: MakeHfFolder, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    pack(make_hf_folder(), tmp_path / "empty")
    check_artifact(tmp_path / "empty")


def test_a_failed_pack_keeps_the_older_calbin(make_hf_folder: MakeHfFolder, tmp_path: Path) -> None:
    folder = make_hf_folder()
    pack(folder, tmp_path / "calbin")
    before = read_artifact(tmp_path / "calbin")
    (folder / "tokenizer.json").write_text("{}")  # found only after the parameters are written
    with pytest.raises(ModelError, match="no tokenizer"):
        pack(folder, tmp_path / "calbin")
    assert check_artifact(tmp_path / "calbin") == before
    assert {each.name for each in tmp_path.iterdir()} == {"model", "calbin"}


def test_an_older_calbin_comes_back_if_publishing_fails(
    make_hf_folder: MakeHfFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = make_hf_folder(), tmp_path / "calbin"
    pack(folder, target)
    before = read_artifact(target)
    rename, calls = Path.rename, []

    def fail_second(self: Path, new: Path) -> Path:
        calls.append(new)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return rename(self, new)

    monkeypatch.setattr(Path, "rename", fail_second)
    with pytest.raises(ModelError, match="calbin: cannot be written: No space left on device"):
        pack(folder, target, lanes=9)
    assert check_artifact(target) == before
    assert {each.name for each in tmp_path.iterdir()} == {"model", "calbin"}


def test_a_calbin_is_no_source(make_hf_folder: MakeHfFolder, tmp_path: Path) -> None:
    pack(make_hf_folder(), tmp_path / "calbin")
    with pytest.raises(ModelError, match="is packed already"):
        pack(tmp_path / "calbin", tmp_path / "again")
