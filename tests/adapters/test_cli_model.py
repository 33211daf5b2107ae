"""``laneway model``: pack, inspect, verify.

Source: E20a, E25, R10.2.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import MODELS, laneway

from laneway.adapters import open_device
from laneway.adapters.device import NpurtDevice
from laneway.adapters.simulated import SimulatorControls
from laneway.adapters.verifying import Forcing

VERDICT_KEYS = [
    *("max_abs_logit_error", "dtype", "rows", "tokens_equal", "tokens_compared", "routing_equal"),
]


def golden_rows(folder: Path) -> int:
    golden = np.load(folder / "golden.npz")
    return sum(len(golden[name]) for name in golden if name.startswith("logits_"))


# ------------------------------------------------------------------------ verify


@pytest.mark.parametrize("name", ["tiny-moe", "demo-shakespeare"])
def test_the_shipped_models_verify(name: str) -> None:
    verdict = laneway("model", "verify", MODELS / name, "--json").done().row
    assert list(verdict) == VERDICT_KEYS
    assert verdict["max_abs_logit_error"] <= 1e-4
    assert verdict["dtype"] == "float32"
    assert verdict["rows"] == golden_rows(MODELS / name)
    assert verdict["tokens_equal"] == verdict["tokens_compared"] <= verdict["rows"]
    assert verdict["routing_equal"] is True


@pytest.mark.parametrize("rule", ["undefined", "mask_csr"])
def test_a_batch_with_fixed_rows_is_packed_and_verifies(tmp_path: Path, rule: str) -> None:
    """Golden rows go one at a time, which no lane rule forbids (E15)."""
    packed = tmp_path / "packed"
    options = ("--batch", "1,4", "--context", 64, "--fixed-rows", "--lane-rule", rule)
    laneway("model", "pack", MODELS / "tiny-moe", packed, *options).done()
    told = json.loads((packed / "manifest.json").read_text())
    assert (told["fixed_rows"], told["lane_rule"]) == (True, rule)
    assert laneway("model", "verify", packed, "--json").done().row["routing_equal"] is True


@pytest.mark.parametrize(
    "shape",
    [
        {"seed": 3, "experts": 4, "hidden": 24, "head_dim": 6},
        {"seed": 4, "tied": True, "layers": 3, "kv_heads": 1, "vocab": 61},
        {"seed": 5, "experts": 3, "fused": True, "norm_topk_prob": False, "dtype": "F32"},
        {"seed": 6, "head_dim": None, "kv_heads": 4, "dtype": "F16", "positions": 32},
    ],
    ids=["moe", "tied", "fused", "f16"],
)
def test_a_random_model_verifies(
    make_hf_folder: Any, tmp_path: Path, shape: dict[str, Any]
) -> None:
    """The golden runs are those of the packer's own float32 reference."""
    folder = make_hf_folder(**shape)
    packed = tmp_path / "packed"
    laneway("model", "pack", folder, packed, "--batch", "1,4", "--lanes", 8).done()
    verdict = laneway("model", "verify", packed, "--json").done().row
    assert verdict["max_abs_logit_error"] <= 1e-4
    assert verdict["rows"] == golden_rows(packed) > 0
    assert verdict["routing_equal"] is (True if "experts" in shape else None)


def test_a_device_may_be_named(make_hf_folder: Any) -> None:
    """Its time may run by itself; a folder that is not packed is packed on the fly."""
    folder = make_hf_folder(experts=3)
    called = laneway("model", "verify", folder, "--device", "sim:?clock=real").done()
    assert called.out.splitlines()[-1] == "verify: ok"
    assert "routing True" in called.out


def bend(folder: Path, tensor: str, *, by: float) -> None:
    """Change one number of one tensor in a safetensors file, and nothing else."""
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    begin, _ = json.loads(raw[8 : 8 + size])[tensor]["data_offsets"]
    at = 8 + size + begin
    value = np.frombuffer(bytes(2) + bytes(raw[at : at + 2]), np.float32) + np.float32(by)
    raw[at : at + 2] = value.tobytes()[2:]
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("tensor", "by"),
    [
        ("model.layers.1.self_attn.k_norm.weight", 1.0),
        ("model.layers.0.mlp.experts.3.down_proj.weight", 2.0),
    ],
)
def test_a_changed_weight_is_a_no(tmp_path: Path, tensor: str, by: float) -> None:
    """The golden file came with the right model: the device computes another one."""
    folder = Path(shutil.copytree(MODELS / "tiny-moe", tmp_path / "model"))
    bend(folder, tensor, by=by)
    verdict = laneway("model", "verify", folder, "--json").done(1).row
    assert list(verdict) == VERDICT_KEYS
    assert verdict["max_abs_logit_error"] > 1e-4
    assert verdict["rows"] == golden_rows(folder)


def test_a_changed_weight_is_told_in_words_and_never_served(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODELS / "tiny-dense", tmp_path / "model"))
    bend(folder, "model.norm.weight", by=0.5)
    called = laneway("model", "verify", folder).done(1)
    assert called.out.splitlines()[-1] == "verify: the device does not compute this model"
    run = ("run", "--prompt-tokens", 1, "--model", folder, "--device", "sim:?clock=virtual")
    laneway(*run).refused(2, "golden", "logits differ")


def test_a_weight_that_is_no_number_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODELS / "tiny-moe", tmp_path / "model"))
    bend(folder, "model.norm.weight", by=float("inf"))
    laneway("model", "verify", folder).refused(2, "model.norm.weight", "not finite")


@pytest.mark.parametrize("name", ["model.safetensors", "golden.npz", "manifest.json"])
def test_a_damaged_calbin_is_refused(packed: Path, name: str) -> None:
    raw = bytearray((packed / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (packed / name).write_bytes(raw)
    laneway("model", "verify", packed).refused(2, name)
    laneway("model", "inspect", packed).refused(2, name)


def test_a_row_counts_once_and_is_equal_only_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong row in the way of decode steps alone costs one token, and the verdict."""
    golden = np.load(MODELS / "tiny-dense" / "golden.npz")
    right = SimulatorControls.logits
    calls = 0
    rows = len(golden["logits_0"])
    wrong_call = rows + len(golden["logits_1"]) + 5  # the second way of the second run

    def logits(self: SimulatorControls, *arguments: Any, **keys: Any) -> Any:
        nonlocal calls
        calls += 1
        values = right(self, *arguments, **keys)
        if calls == wrong_call:
            values[(int(np.argmax(values)) + 1) % len(values)] = values.max() + 1
        return values

    monkeypatch.setattr(SimulatorControls, "logits", logits)
    device = open_device("sim:?clock=virtual&capture=1")
    assert isinstance(device, NpurtDevice)
    verdict = Forcing(device, str(MODELS / "tiny-dense")).verify()
    device.stop()
    assert len(golden["prompt_0"]) == 1, "the first run has one way only"
    assert calls > wrong_call
    assert verdict.rows == golden_rows(MODELS / "tiny-dense")
    assert verdict.tokens_compared <= verdict.rows
    assert verdict.tokens_equal == verdict.tokens_compared - 1
    assert not verdict.ok


# ------------------------------------------------------------------------ pack and inspect


def test_what_is_packed_is_what_was_asked_for(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    options = ("--batch", "1,4", "--lanes", 16, "--context", 128, "--layout", "pp2")
    called = laneway("model", "pack", MODELS / "tiny-moe", packed, *options).done()
    assert str(packed) in called.out
    found = laneway("model", "inspect", packed, "--json").done().row
    text = laneway("model", "inspect", packed).done().out
    assert json.loads(text) == found
    told = json.dumps(found)
    assert '"lanes": 16' in told and '"context": 128' in told and '"layout": "pp2"' in told
    again = tmp_path / "again"
    laneway("model", "pack", MODELS / "tiny-moe", again, *options).done()
    files = sorted(file.name for file in packed.iterdir())
    assert files == sorted(file.name for file in again.iterdir())
    for name in files:
        assert (packed / name).read_bytes() == (again / name).read_bytes(), name


def test_a_link_out_of_the_folder_needs_a_model_root(tmp_path: Path) -> None:
    blobs = tmp_path / "root" / "blobs"
    shutil.copytree(MODELS / "tiny-dense", blobs)
    snapshot = tmp_path / "root" / "snapshot"
    snapshot.mkdir(mode=0o755)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    laneway("model", "pack", snapshot, tmp_path / "out").refused(2, "model root")
    root = ("--model-root", tmp_path / "root")
    laneway("model", "pack", snapshot, tmp_path / "out", *root).done()
    laneway("model", "inspect", snapshot, *root).done()
    laneway("model", "verify", snapshot).refused(2, "model root")
    assert "verify: ok" in laneway("model", "verify", snapshot, *root).done().out
