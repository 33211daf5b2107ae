"""Whether a calbin is what its manifest says; preparing and inspecting model folders."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from laneway.adapters.calbin import check_artifact, inspect, pack, prepare, read_artifact
from laneway.adapters.manifest import Manifest, encode_manifest
from laneway.engine.errors import ModelError

MODELS = Path(__file__).parents[2] / "models"
NAMES = ("demo-shakespeare", "tiny-dense", "tiny-moe")
MakeHfFolder = Callable[..., Path]
Tensors = dict[str, NDArray[np.float32]]


# Checking an artifact ---------------------------------------------------------------------------


def test_every_damaged_byte_is_found(packed: Path) -> None:
    for name in ("model.safetensors", "golden.npz"):
        path = packed / name
        whole = path.read_bytes()
        for at in range(0, len(whole), len(whole) // 23):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(ModelError, match=f"{name}: damaged: its SHA-256"):
                check_artifact(packed)
        path.write_bytes(whole[:-1])
        with pytest.raises(ModelError, match=f"{name}: {len(whole) - 1} bytes, manifest.json says"):
            check_artifact(packed)
        path.write_bytes(whole)
    check_artifact(packed)


def test_names_the_file_that_is_missing_or_not_named(packed: Path) -> None:
    (packed / "extra.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="extra.bin: is not named in manifest.json"):
        check_artifact(packed)
    (packed / "extra.bin").unlink()
    (packed / "golden.npz").chmod(0o666)
    with pytest.raises(ModelError, match="golden.npz: writable by others"):
        check_artifact(packed)
    (packed / "golden.npz").unlink()
    with pytest.raises(ModelError, match="golden.npz: file is missing"):
        check_artifact(packed)


def test_hashes_alone_do_not_make_a_model(make_hf_folder: MakeHfFolder, tmp_path: Path) -> None:
    # A manifest whose hashes are right, over parameters of another shape.
    pack(make_hf_folder("one"), tmp_path / "calbin")
    pack(make_hf_folder("two", vocab=41), tmp_path / "larger")
    stated = json.loads((tmp_path / "calbin" / "manifest.json").read_text())
    larger = json.loads((tmp_path / "larger" / "manifest.json").read_text())
    stated["files"]["model.safetensors"] = larger["files"]["model.safetensors"]
    shutil.copyfile(
        tmp_path / "larger" / "model.safetensors", tmp_path / "calbin" / "model.safetensors"
    )
    (tmp_path / "calbin" / "manifest.json").write_text(json.dumps(stated))
    with pytest.raises(ModelError, match=r"embed_tokens.weight is BF16 \[41, 16\], manifest.json"):
        check_artifact(tmp_path / "calbin")


def edit_manifest(path: tuple[str, ...], value: Any) -> Callable[[Any], None]:
    def edit(stated: Any) -> None:
        for key in path[:-1]:
            stated = stated[int(key) if isinstance(stated, list) else key]
        if value is ...:
            del stated[path[-1]]
        else:
            stated[path[-1]] = value

    return edit


BAD_MANIFESTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "format": (edit_manifest(("format",), "calbin"), "format is 'calbin' version 1; this release"),
    "version": (edit_manifest(("format_version",), 2), "version 2; this release reads"),
    "version missing": (edit_manifest(("format_version",), ...), "format_version"),
    "unknown key": (edit_manifest(("colour",), "red"), "unknown field `colour`"),
    "unknown inner key": (edit_manifest(("shape", "colour"), 1), "unknown field `colour`"),
    "key missing": (edit_manifest(("shape", "vocab"), ...), "missing required field `vocab`"),
    "type": (edit_manifest(("lanes",), "8"), r"\$.lanes"),
    "bool as count": (edit_manifest(("lanes",), True), r"\$.lanes"),
    "too many lanes": (edit_manifest(("lanes",), 65), r"\$.lanes"),
    "architecture": (edit_manifest(("architecture",), "llama"), "architecture"),
    "dense with experts": (edit_manifest(("architecture",), "qwen3"), "a dense model has no"),
    "version text": (edit_manifest(("needs", "driver"), "0.1b"), r"\$.needs.driver"),
    "version dots": (edit_manifest(("needs", "driver"), "0..1"), r"\$.needs.driver"),
    "name lines": (edit_manifest(("name",), "a\nb"), r"\$.name"),
    "kv per token": (edit_manifest(("kv", "bytes_per_token"), 65), "kv.bytes_per_token is 65"),
    "kv per lane": (edit_manifest(("kv", "bytes_per_lane"), 64), "kv.bytes_per_lane is 64"),
    "kv sum": (edit_manifest(("bytes", "kv"), [1, 2]), "bytes.kv adds up to 3"),
    "params sum": (edit_manifest(("bytes", "params"), [1, 2]), "bytes.params adds up to less"),
    "params negative": (edit_manifest(("bytes", "params"), [-1, 2]), "bytes.params"),
    "chips listed": (edit_manifest(("bytes", "other"), [0]), "bytes.other does not have 2"),
    "chip count": (edit_manifest(("chips", "count"), 1), "layout tp2 is for 2 chips"),
    "chip mask": (edit_manifest(("chips", "mask"), 1), "chips.mask 1 does not name 2 chips"),
    "no decode": (edit_manifest(("submodels", "1", "task"), "prefill"), "both tasks"),
    "same names": (edit_manifest(("submodels", "1", "name"), "prefill_b1"), "the same name"),
    "decode tokens": (edit_manifest(("submodels", "1", "max_tokens"), 2), "a decode takes 1"),
    "batch": (edit_manifest(("submodels", "1", "max_batch"), 9), "max_batch 9 > lanes 8"),
    "tokens": (edit_manifest(("submodels", "0", "max_tokens"), 65), "max_tokens 65 > context"),
    "end token": (edit_manifest(("eos_token_ids",), [40]), "end token 40 is outside"),
    "experts chosen": (edit_manifest(("shape", "experts_per_token"), 4), "4 of 3 experts"),
    "file missing": (edit_manifest(("files", "golden.npz"), ...), "does not name golden.npz"),
    "file outside": (
        edit_manifest(("files", "../x"), {"sha256": "0" * 64, "bytes": 1}),
        "no plain file name",
    ),
    "file unknown": (
        edit_manifest(("files", "x.bin"), {"sha256": "0" * 64, "bytes": 1}),
        "no part of the format",
    ),
    "hash": (edit_manifest(("files", "golden.npz", "sha256"), "0"), "sha256"),
    "other hash": (edit_manifest(("files", "golden.npz", "sha256"), "0" * 64), "damaged: its SHA"),
}


@pytest.mark.parametrize(("edit", "message"), BAD_MANIFESTS.values(), ids=BAD_MANIFESTS.keys())
def test_refuses_manifests_that_contradict_themselves(
    edit: Callable[[Any], None], message: str, packed: Path
) -> None:
    path = packed / "manifest.json"
    stated = json.loads(path.read_text())
    edit(stated)
    path.write_text(json.dumps(stated))
    with pytest.raises(ModelError, match=message) as refusal:
        check_artifact(packed)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_refuses_what_is_no_manifest(raw: bytes, make_hf_folder: MakeHfFolder) -> None:
    folder = make_hf_folder()
    (folder / "manifest.json").write_bytes(raw)
    with pytest.raises(ModelError, match="no valid manifest"):
        read_artifact(folder)


def test_a_manifest_survives_its_own_encoding(packed: Path) -> None:
    manifest = read_artifact(packed).manifest
    assert msgspec.json.decode(encode_manifest(manifest), type=Manifest) == manifest
    assert manifest.batch_max == 1


# Preparing and inspecting -----------------------------------------------------------------------


def test_prepares_either_kind_of_folder(make_hf_folder: MakeHfFolder, tmp_path: Path) -> None:
    folder = make_hf_folder()
    with prepare(folder) as packed:
        assert packed.name == "model" and packed != folder.resolve()
        made = check_artifact(packed)
    assert not packed.exists()
    assert folder.exists()
    pack(folder, tmp_path / "calbin", name="model")
    with prepare(tmp_path / "calbin") as packed:
        assert packed == (tmp_path / "calbin").resolve()
        assert check_artifact(packed).sha256 == made.sha256
    assert packed.exists()
    (tmp_path / "neither").mkdir()
    with pytest.raises(ModelError, match="neither manifest.json"), prepare(tmp_path / "neither"):
        pass


def test_a_prepared_folder_goes_away_after_an_error(make_hf_folder: MakeHfFolder) -> None:
    seen: list[Path] = []
    with pytest.raises(ZeroDivisionError), prepare(make_hf_folder()) as packed:
        seen.append(packed)
        raise ZeroDivisionError
    assert [path.name for path in seen] == ["model"] and not seen[0].exists()


def test_inspects_either_kind_of_folder(tmp_path: Path) -> None:
    told = inspect(MODELS / "tiny-moe")
    assert json.loads(json.dumps(told)) == told
    assert told["parameters"] == 824704 // 2
    assert told["kv_plan"] == {
        **{"lanes": 8, "context": 512, "tokens": 4096, "bytes_per_token": 512},
        **{"bytes_per_lane": 262144, "bytes": 2097152},
    }
    assert [chip["params"] for chip in told["chips"]] == [445120, 379584]
    assert told["golden"] == {"runs": 4, "rows": 32 + 38 + 63 + 91, "positions": 91}
    pack(MODELS / "tiny-moe", tmp_path / "tiny-moe")
    packed = inspect(tmp_path / "tiny-moe")
    assert packed.pop("folder") == str(tmp_path / "tiny-moe") != told.pop("folder")
    assert packed == told
    (tmp_path / "tiny-moe" / "golden.npz").write_bytes(b"")
    with pytest.raises(ModelError, match="golden.npz"):
        inspect(tmp_path / "tiny-moe")
