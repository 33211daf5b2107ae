"""Open the simulated board: ``sim:PROFILE?key=value&…``.

The library is found as adapters/library.py says; the URL's keys become the board's configuration.
``clock=real`` (default) runs by itself, ``manual`` and ``virtual`` stand still until stepped:
``manual`` by a test, ``virtual`` by an engine without threads, as fast as the machine allows.
``checks=`` says which mistakes with memory in flight the board looks for: ``all``, ``none``, or
some of ``input``, ``output`` and ``reuse`` with ``+`` between them; profile ``tiny`` looks for all.
``overlap=`` says what of two jobs in flight overlaps: 0 nothing, 1 their commands only, 2 the
transfer to the device with the other's compute, 3 (default) all three phases. ``persona=`` makes
the board answer for its capabilities like another runtime: a file, or the name of one shipped here.
``reset1=`` … ``reset4=`` say what a reset level does, ``reset1_claims=`` … what it claims to do.
``records=none`` leaves out the records of verification that the simulator carries without a persona
(conformance.py). ``samplers=`` is how many threads share the rows of a job that is done.

Source: native/npurt_sim.h.
"""

from pathlib import Path

import attrs

from laneway.adapters.arena import Graveyard
from laneway.adapters.binding import Library
from laneway.adapters.conformance import PROOFS
from laneway.adapters.device import NpurtDevice, open_calls
from laneway.adapters.files import is_file, read_named_text
from laneway.adapters.library import open_library
from laneway.adapters.sampling_threads import THREADS_MAX
from laneway.adapters.simulated import SimulatorControls
from laneway.adapters.urls import parse_rest, read_number
from laneway.adapters.validating import ArtifactOptions
from laneway.engine.errors import CapabilityError, ConfigurationError

PLAN_BYTES_MAX = 1 << 20
PROFILES = ("tiny", "null", "cost", "tp2-ref", "tp2-b4", "tp2-b8", "tp2-b16")
CLOCKS = ("real", "manual", "virtual")
BOARD_KEYS = (
    *("seed", "clock", "scale", "strict", "capture", "checks", "overlap", "dram_bytes"),
    *("h2d", "d2h", "prefill", "decode", "persona"),
    *("runtime_version", "driver_version", "firmware_version", "reset_interval"),
    *("board", "cancel"),
    *(f"reset{level}{claims}" for level in range(1, 5) for claims in ("", "_claims")),
)
KEYS = (*BOARD_KEYS, "faults", "records", "samplers")


def open_device(
    rest: str,
    *,
    library: str | None = None,
    options: ArtifactOptions | None = None,
    graveyard: Graveyard | None = None,
    exclusive: bool = False,
    whole_jobs: bool = False,
) -> NpurtDevice:
    """Open a simulated board by the rest of its URL.

    ``graveyard`` takes memory that must be kept; by default one that counts for the process.
    ``whole_jobs``: a stepped board moves from one end of a job to the next.
    Raises: ConfigurationError for an unknown profile, key or value, or a missing library.
    """
    profile, values = parse_rest(rest, known=KEYS, scheme="sim")
    profile = profile or "tiny"
    if profile not in PROFILES:
        raise ConfigurationError(f"sim:{profile}: the profiles are {', '.join(PROFILES)}")
    clock = values.setdefault("clock", "real")
    if clock not in CLOCKS:
        raise ConfigurationError(f"sim: clock={clock}: one of {', '.join(CLOCKS)} is wanted")
    plan = _read_plan(values.pop("faults", None))
    if "persona" in values:
        values["persona"] = _find_persona(values["persona"])
    proven = _read_proven(values)
    samplers = read_number(values, "samplers", default=1, least=1, most=THREADS_MAX, scheme="sim")
    values.pop("samplers", None)
    opened = _need_simulator(open_library(library))
    config = "\n".join(f"{key} = {value}" for key, value in {"profile": profile, **values}.items())
    calls = open_calls(opened, config=config, exclusive=exclusive)
    controls = SimulatorControls(calls)
    try:
        controls.set_faults(plan)
        return NpurtDevice(
            calls,
            url=f"sim:{rest}",
            simulator=controls,
            stepped=clock != "real",
            virtual=clock == "virtual",
            scale=float(values.get("scale", "1")),
            options=_without_golden(options or ArtifactOptions()) if profile == "null" else options,
            graveyard=graveyard,
            proven=proven,
            whole_jobs=whole_jobs,
            samplers=samplers,
        )
    except BaseException:
        calls.attempt("npurt_device_close")
        raise


def _read_plan(path: str | None) -> str:
    if path is None:
        return ""
    return read_named_text(path, bytes_max=PLAN_BYTES_MAX, what="sim: faults")


def _find_persona(given: str) -> str:
    """Take the name of a shipped persona, or the path of a file, for its path."""
    shipped = Path(__file__).with_name(f"{given}.persona")
    if "/" not in given and shipped.is_file():
        return str(shipped)
    if not is_file(given, what="sim: persona"):
        names = sorted(file.stem for file in Path(__file__).parent.glob("*.persona"))
        raise ConfigurationError(f"sim: persona={given}: no such file; shipped: {', '.join(names)}")
    return given


def _read_proven(values: dict[str, str]) -> tuple[str, ...]:
    """Take the key ``records``; return the capabilities that carry a record (G22)."""
    records = values.pop("records", None)
    if records not in (None, "none"):
        raise ConfigurationError(f"sim: records={records}: none is the only word; use --records")
    return () if records == "none" or "persona" in values else tuple(PROOFS)


def _need_simulator(library: Library) -> Library:
    if not library.simulates:
        raise CapabilityError(
            f"{library.path} is not the simulator: open it as npurt:{library.path}"
        )
    return library


def _without_golden(options: ArtifactOptions) -> ArtifactOptions:
    """Why: the profile computes nothing, so its numbers cannot be held against golden ones."""
    return attrs.evolve(options, compare_golden=False)
