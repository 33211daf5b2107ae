"""Find out what of two jobs in flight overlaps: which of four hypotheses the device keeps.

0 serial: nothing. 1 banks only: commands are prepared early, phases are serial. 2 H2D: one job's
transfer to the device overlaps the other's compute. 3 full: all three phases overlap.

Theory of operation. The same job runs many times, first one at a time, then always two in flight.
From the times that the device gives of each phase follow the shares of H2D and of D2H during which
the other job computed or transferred; from the durations alone follows how long a job must take
under each hypothesis. Shares decide, and the time from end to end must agree, where hypotheses
differ by more than what a clock can blur. Between serial and banks only the phases cannot tell: a
device that accepts late or uses one bank is serial, and after that there is only the device's own
word. The note says which evidence it was.

Source: R5.2.
"""

import random
import statistics
from collections.abc import Iterator, Sequence

import attrs

from laneway.adapters import npurt
from laneway.adapters.npurt import Code
from laneway.adapters.probing import CheckFailed, Finding, Flight, Output, Piece, Probed

NAMES = ("serial", "banks only", "H2D overlaps compute", "all phases overlap")
SERIAL, BANKS, H2D, FULL = range(4)
JOBS = 16
WARM_JOBS = 2
PROMPT_TOKENS = 24
OVERLAPS_FROM, APART_UNTIL = 0.25, 0.05
WALL_TOLERANCE = 0.15
_NEEDED = 0b1_1111_1111  # every instant of npurt_times


@attrs.frozen(kw_only=True)
class Phases:
    """The instants of one job in device time."""

    submit: int
    accept: int
    h2d: tuple[int, int]
    compute: tuple[int, int]
    d2h: tuple[int, int]
    visible: int

    @classmethod
    def of(cls, times: npurt.Times) -> "Phases":
        """Take the instants. Raises: CheckFailed where the device does not tell them all."""
        if times.valid & _NEEDED != _NEEDED:
            raise CheckFailed(f"the device does not tell every instant (valid {times.valid:#x})")
        return cls(
            submit=times.submit,
            accept=times.accept,
            h2d=(times.h2d_begin, times.h2d_end),
            compute=(times.exec_begin, times.exec_end),
            d2h=(times.d2h_begin, times.d2h_end),
            visible=times.visible,
        )


@attrs.frozen(kw_only=True)
class Seen:
    """What was measured; shares from 0 to 1, pauses and periods in ns."""

    h2d_share: float
    d2h_share: float
    compute_share: float
    pause_alone_ns: float
    pause_paired_ns: float
    period_ns: float
    phases_ns: tuple[float, float, float]
    waited_for_accept: bool
    banks: tuple[int, ...] = ()


def predict_periods(h2d: float, compute: float, d2h: float) -> tuple[float, float, float, float]:
    """Return the time from one end to the next with two in flight, under each hypothesis.

    With H2D a transfer hides behind the other's compute, or the other way round, and D2H has the
    link for itself. With full overlap the slowest phase is the limit, or half of a whole job.
    """
    whole = h2d + compute + d2h
    return whole, whole, max(h2d, compute) + d2h, max(h2d, compute, d2h, whole / 2)


def judge(seen: Seen, device_word: int | None) -> tuple[int, str]:
    """Return hypothesis and evidence. Raises: CheckFailed where the evidence contradicts itself."""
    shares = f"H2D beside the other job {seen.h2d_share:.0%}, D2H {seen.d2h_share:.0%}"
    for share in (seen.h2d_share, seen.d2h_share):
        if APART_UNTIL < share < OVERLAPS_FROM:
            raise CheckFailed(f"neither apart nor overlapping: {shares}")
    if seen.compute_share > APART_UNTIL:
        raise CheckFailed(f"two jobs computed at once for {seen.compute_share:.0%} of the time")
    if seen.d2h_share >= OVERLAPS_FROM:
        found, evidence = FULL, shares
    elif seen.h2d_share >= OVERLAPS_FROM:
        found, evidence = H2D, shares
    else:
        found, evidence = _judge_banks(seen, device_word, shares)
    return found, f"{NAMES[found]}: {evidence}; {_hold_wall(seen, found)}"


def _judge_banks(seen: Seen, device_word: int | None, shares: str) -> tuple[int, str]:
    """Tell serial from banks only, by what can tell them.

    Why the pause before a job does not decide: a queue of the driver shortens it as banks do.
    """
    if seen.waited_for_accept:
        return SERIAL, f"{shares}, and a job was accepted only when the other had ended"
    if len(seen.banks) == 1:
        return SERIAL, f"{shares}, and every job ran on bank {seen.banks[0]}"
    pauses = f"{seen.pause_alone_ns:.0f} ns alone, {seen.pause_paired_ns:.0f} ns with two"
    doubt = (
        f"both banks are used, the pause before a job is {pauses}; serial and banks only are not"
        " distinguishable by that"
    )
    if device_word in (SERIAL, BANKS):
        return device_word, f"{shares}; {doubt}, taken is the device's own word"
    return SERIAL, f"{shares}; {doubt}, taken is the lesser"


def _hold_wall(seen: Seen, found: int) -> str:
    """Hold the time from end to end against the hypothesis. Raises: CheckFailed."""
    predicted = predict_periods(*seen.phases_ns)
    told = f"a job each {seen.period_ns:.0f} ns, predicted {predicted[found]:.0f}"
    nearest = min((SERIAL, H2D, FULL), key=lambda each: abs(seen.period_ns - predicted[each]))
    apart = abs(predicted[nearest] - predicted[found])
    if apart > WALL_TOLERANCE * predicted[SERIAL]:
        raise CheckFailed(
            f"phases say {NAMES[found]}, the time from end to end {NAMES[nearest]}: {told}"
        )
    return told


# ---------------------------------------------------------------------------- measuring


def check_overlap(probed: Probed, seed: int) -> Iterator[Finding]:
    """Name the hypothesis that times and wall agree on."""
    row = next((row for row in probed.facts.capabilities if row.name == "OVERLAP_MODEL"), None)
    word = row.value if row is not None and row.supported else None
    found, note = judge(measure(probed, seed), word)
    yield Finding("OVERLAP_MODEL", value=found, note=note)


def check_parallel_mode(probed: Probed, seed: int) -> Iterator[Finding]:
    """Turn parallel mode off and on with nothing in flight; say what it changes."""
    found = []
    for mode in (0, 1):
        answer = probed.calls.attempt("npurt_device_set", npurt.OPTION_PARALLEL_MODE, mode)
        if answer.code == Code.UNSUPPORTED:
            yield Finding.skip("PARALLEL_MODE", f"mode {mode} does not exist: {answer.reason}")
            return
        if not answer.ok:
            raise CheckFailed(f"mode {mode}: {answer.reason}")
        found.append(judge(measure(probed, seed), SERIAL if mode == 0 else None)[0])
    note = f"mode 0: {NAMES[found[0]]}; mode 1: {NAMES[found[1]]}; outputs equal in both"
    yield Finding("PARALLEL_MODE", value=1, note=note)


def measure(probed: Probed, seed: int) -> Seen:
    """Run the same job one at a time and two at a time. Raises: CheckFailed if outputs differ."""
    drawn = random.Random(seed)
    longest = max((part.tokens_max for part in probed.parts if part.task == "prefill"), default=1)
    tokens = tuple(
        drawn.randrange(probed.info.vocab) for _ in range(max(1, min(PROMPT_TOKENS, longest)))
    )
    alone = _run(probed, tokens, depth=1)
    paired = _run(probed, tokens, depth=2)
    for output in (*alone, *paired):
        if not output.equals(alone[0]):
            raise CheckFailed("the same job gave different bits")
    single = [Phases.of(output.times) for output in alone[WARM_JOBS:]]
    double = [Phases.of(output.times) for output in paired]
    double.sort(key=lambda phases: phases.h2d[0])
    neighbours = list(zip(double, double[1:], strict=False))[WARM_JOBS:]
    if sum(second.submit < first.visible for first, second in neighbours) < len(neighbours) // 2:
        raise CheckFailed("jobs end before the next is submitted: too short to tell")
    banks = tuple(sorted({output.engine for output in paired}))
    return attrs.evolve(_see(single, double, neighbours), banks=banks)


def _see(
    single: Sequence[Phases],
    double: Sequence[Phases],
    neighbours: Sequence[tuple[Phases, Phases]],
) -> Seen:
    h2d = [_length(each.h2d) for each in double]
    compute = [_length(each.compute) for each in double]
    d2h = [_length(each.d2h) for each in double]
    ends = [each.visible for each in sorted(double, key=lambda each: each.visible)]
    return Seen(
        h2d_share=_share((second.h2d, (first.compute, first.d2h)) for first, second in neighbours),
        d2h_share=_share((first.d2h, (second.h2d, second.compute)) for first, second in neighbours),
        compute_share=_share((first.compute, (second.compute,)) for first, second in neighbours),
        pause_alone_ns=statistics.median(each.h2d[0] - each.accept for each in single),
        pause_paired_ns=statistics.median(
            max(0, second.h2d[0] - first.d2h[1]) for first, second in neighbours
        ),
        period_ns=(ends[-1] - ends[WARM_JOBS]) / (len(ends) - 1 - WARM_JOBS),
        phases_ns=(statistics.median(h2d), statistics.median(compute), statistics.median(d2h)),
        waited_for_accept=all(second.accept >= first.visible for first, second in neighbours),
    )


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _share(spans: Iterator[tuple[tuple[int, int], tuple[tuple[int, int], ...]]]) -> float:
    """Return which share of some spans others cover."""
    covered = whole = 0
    for span, others in spans:
        whole += _length(span)
        covered += sum(max(0, min(span[1], other[1]) - max(span[0], other[0])) for other in others)
    return covered / whole if whole else 0.0


def _run(probed: Probed, tokens: tuple[int, ...], *, depth: int) -> list[Output]:
    """Keep ``depth`` jobs in flight until enough have ended, each a prompt on a fresh lane."""
    outputs: list[Output] = []
    flying: list[Flight] = []
    started = 0
    while len(outputs) < JOBS:
        while len(flying) < depth and started < JOBS:
            flying.append(probed.start((Piece(probed.open(), tokens),)))
            started += 1
        ended = probed.wait(flying)
        flying.remove(ended)
        outputs.append(probed.finish(ended))
        probed.release(ended.pieces[0].sequence)
    return outputs
