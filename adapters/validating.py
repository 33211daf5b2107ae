"""Check an artifact on the host and let the device read it, before anything is configured (E20a).

This runs on a thread of its own: hashing takes as long as the files are large, and the threads that
drive the device must not wait for it. Nothing here changes the device.
"""

import ctypes
import os
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack

import attrs

from laneway.adapters import npurt
from laneway.adapters.buffers import SubmodelPart, read_submodel
from laneway.adapters.calbin import Artifact, check_artifact, prepare
from laneway.adapters.calls import DeviceCalls
from laneway.adapters.facts import read_chips
from laneway.adapters.golden import load_golden
from laneway.adapters.loaded import LoadedModel
from laneway.adapters.rooted import open_root
from laneway.adapters.text import open_text
from laneway.adapters.trials import TrialRun, plan_trials
from laneway.engine.effects import ValidateArtifact
from laneway.engine.errors import DeviceError, ModelError
from laneway.engine.inputs import (
    ArtifactRefused,
    ArtifactValidated,
    ChipFacts,
    Input,
    SubmodelFacts,
)
from laneway.engine.lanes import warm_up_lanes
from laneway.engine.logits import warm_up

_ARTIFACT_CLASS = 0x05


@attrs.frozen(kw_only=True)
class ArtifactOptions:
    """How artifacts are opened and tried.

    ``compare_golden`` False runs the golden trials without comparing: for a simulator that computes
    nothing. ``model_root``: see the calbin adapter.
    """

    model_root: str | None = None
    golden_decode_steps: int = 4
    warmup_decode_steps: int = 2
    compare_golden: bool = True


class Validation:
    """Validates artifacts for one device; one thread at a time."""

    def __init__(
        self,
        calls: DeviceCalls,
        models: MutableMapping[int, LoadedModel],
        options: ArtifactOptions,
        *,
        chips: tuple[int, ...],
        post: Callable[[Input], None],
    ) -> None:
        self._calls = calls
        self._models = models
        self._options = options
        self._chips = chips
        self._post = post

    def validate(self, effect: ValidateArtifact) -> None:
        """Answer with what the artifact is and needs, or with why it is refused."""
        with ExitStack() as files:
            try:
                model, answer = self._open(effect, files)
                if effect.check:
                    self._let_go(model)
            except (ModelError, DeviceError, OSError, ValueError) as error:
                self._post(ArtifactRefused(model=effect.model, reason=str(error)))
                return
            if effect.check:
                self._post(answer)
                return
            model.files.push(files.pop_all())
        self._models[effect.model] = model
        self._post(answer)

    def _let_go(self, model: LoadedModel) -> None:
        """Give back what a check made. Raises: DeviceError."""
        with self._calls.shared():
            self._calls.library.call(
                "npurt_calbin_release", model.calbin, about=f"model/{model.number}"
            )

    def _open(
        self, effect: ValidateArtifact, files: ExitStack
    ) -> tuple[LoadedModel, ArtifactValidated]:
        root_option = self._options.model_root
        folder = files.enter_context(prepare(effect.source, model_root=root_option))
        artifact = check_artifact(folder, model_root=root_option)
        root = open_root(folder, model_root=root_option)
        manifest = artifact.manifest
        golden = load_golden(root, manifest.shape, context=manifest.context)
        text = open_text(root, manifest)
        with self._calls.shared():
            calbin, info = self._create(artifact)
            parts = tuple(
                read_submodel(self._calls, calbin, index) for index in range(info.submodel_count)
            )
            chips = read_chips(self._calls, self._chips)
        submodels = tuple(_submodel_facts(part) for part in parts)
        runs = plan_trials(
            golden,
            submodels,
            context_tokens=info.max_context,
            vocabulary=info.vocab,
            golden_decode_steps=self._options.golden_decode_steps,
            warmup_decode_steps=self._options.warmup_decode_steps,
        )
        if not self._options.compare_golden:
            runs = tuple(TrialRun(run.trial, None) for run in runs)
        # Kernels are compiled, or read from the disk, before the first job and not within it.
        warm_up(info.vocab)
        warm_up_lanes()
        model = LoadedModel(
            number=effect.model,
            calbin=calbin,
            folder=os.fspath(artifact.folder),
            sha256=artifact.sha256,
            name=manifest.name,
            vocabulary=info.vocab,
            context_tokens=info.max_context,
            kv_layout=npurt.KV_LAYOUTS[manifest.kv_layout],
            chip_mask=info.chip_mask,
            text=text,
            submodels=parts,
            trials=runs,
            files=ExitStack(),
        )
        return model, _validated(effect.model, artifact, info, submodels, chips, runs)

    def _create(self, artifact: Artifact) -> tuple[ctypes.c_void_p, npurt.CalbinInfo]:
        """Let the device's library read the calbin. Raises: ModelError, DeviceError."""
        folder = os.fspath(artifact.folder)
        calbin = create_calbin(self._calls, folder=folder, sha256=artifact.sha256)
        info = npurt.CalbinInfo()
        self._calls.library.call("npurt_calbin_describe", calbin, ctypes.byref(info))
        return calbin, info


def create_calbin(calls: DeviceCalls, *, folder: str, sha256: str) -> ctypes.c_void_p:
    """Let the device's library read a calbin, which must have this hash.

    Raises: ModelError for a refusal of the artifact, DeviceError for anything else.
    """
    source = npurt.CalbinSource(path=os.fsencode(folder), expect_sha256=sha256.encode())
    calbin = ctypes.c_void_p()
    answer = calls.attempt("npurt_calbin_create", ctypes.byref(source), ctypes.byref(calbin))
    if npurt.code_class(answer.code) == _ARTIFACT_CLASS:
        raise ModelError(f"{folder}: the device refuses it: {answer.reason}")
    calls.library.check(answer, about=folder)
    return calbin


def _submodel_facts(part: SubmodelPart) -> SubmodelFacts:
    return SubmodelFacts(
        name=part.name,
        task=part.task,
        batch_max=part.batch_max,
        tokens_max=part.tokens_max,
        incremental=part.incremental,
        fixed_rows=part.fixed_rows,
    )


def _validated(
    number: int,
    artifact: Artifact,
    info: npurt.CalbinInfo,
    submodels: tuple[SubmodelFacts, ...],
    chips: tuple[ChipFacts, ...],
    runs: tuple[TrialRun, ...],
) -> ArtifactValidated:
    manifest = artifact.manifest
    kinds = (info.param_bytes, info.kv_bytes, info.workspace_bytes, info.other_bytes)
    masked = [chip for chip in range(npurt.MAX_CHIPS) if info.chip_mask & (1 << chip)]
    return ArtifactValidated(
        model=number,
        name=manifest.name,
        sha256=artifact.sha256,
        architecture=manifest.architecture,
        layout=npurt.LAYOUTS.get(info.layout, manifest.layout),
        lane_rule=manifest.lane_rule,
        context_tokens=info.max_context,
        vocabulary=info.vocab,
        lane_count=info.max_lanes,
        end_tokens=tuple(manifest.eos_token_ids),
        submodels=submodels,
        chip_bytes=tuple(sum(kind[chip] for kind in kinds) for chip in masked),
        chips=chips,
        trials=tuple(run.trial for run in runs),
    )
