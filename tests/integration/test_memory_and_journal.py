"""Host memory over a real run, and the journal that a real run leaves in a file.

Source: R3.4, R4.4, R4.6, E1, E4, E9 (memory); R18.5, I11 (journal).
"""

from pathlib import Path

import attrs
import numpy as np
import pytest
from support.asking import GREEDY, Ask, answer_alone, draw_ask, outcomes
from support.real_engine import RealEngine, check_journal
from support.synchronous import Arrival

from laneway.adapters.arena import Arena
from laneway.engine.evolve import fold
from laneway.engine.inputs import Completed
from laneway.engine.ports import Step
from laneway.engine.state import freeze, initial_state
from laneway.journal import open_journal
from laneway.journal.stats import stats

MARKED = Ask(prompt=(301, 302, 303, 304, 305), max_tokens=6, sampling=GREEDY, ignore_eos=True)


def read(arena: Arena) -> bytes:
    return arena.view(0, (arena.byte_count,), np.uint8).tobytes()


def check_free_is_clean(real: RealEngine) -> dict[str, int]:
    """E4: what is free holds nothing of anybody; return how many buffers are in which state."""
    states = {number: b.state for number, b in real.engine._state.buffers.items()}
    for number, arena in real.arenas.items():
        if states[number] == "free":
            assert not any(read(arena)), f"buffer/{number} is free and holds something"
    return {state: list(states.values()).count(state) for state in states.values()}


def test_a_buffer_that_is_free_holds_nothing_at_every_step(calbin: Path) -> None:
    """The prompt is in memory while its job is in flight, and in none of it afterwards."""
    real = RealEngine(calbin)
    random = np.random.default_rng(8)
    real.submit(MARKED)
    real.engine.run_until_idle()
    trace = np.array(MARKED.prompt, np.int32).tobytes()
    assert sum(trace in read(arena) for arena in real.arenas.values()) == 1
    for _ in range(5):
        real.submit(draw_ask(random))
    real.streams[3].cancel()
    seen = set()
    while real.engine.advance():
        seen |= set(check_free_is_clean(real))
    assert {"free", "submitted", "completing"} <= seen, "the states in between were looked at"
    assert set(check_free_is_clean(real)) == {"free"}
    assert outcomes(real.results())[0] == answer_alone(calbin, MARKED)
    real.close()


def test_a_cancelled_request_leaves_no_trace_either(calbin: Path) -> None:
    real = RealEngine(calbin)
    stream = real.submit(MARKED)
    real.engine.run_until_idle()
    stream.cancel()
    real.engine.run_until_idle()
    assert stream.result().finish_reason == "cancelled"
    trace = np.array(MARKED.prompt, np.int32).tobytes()
    held = [number for number, arena in real.arenas.items() if trace in read(arena)]
    assert len(held) == 1, "R3.5: the device may still read it"
    real.run()
    assert set(check_free_is_clean(real)) == {"free"}
    real.close()


def test_addresses_never_change_and_nothing_is_mapped_again(calbin: Path) -> None:
    """R4.6: one mapping for each tensor, made at the load; Python itself refuses to move it."""
    real = RealEngine(calbin)
    mapped = list(real.log.mapped)
    addresses = {number: arena.address for number, arena in real.arenas.items()}
    random = np.random.default_rng(9)
    real.run([Arrival(3 * number, draw_ask(random)) for number in range(12)])
    assert real.log.mapped == mapped
    assert {number: arena.address for number, arena in real.arenas.items()} == addresses
    assert len({address for address, _ in mapped}) == len(mapped)
    inside = [
        arena
        for address, size in mapped
        for arena in real.arenas.values()
        if arena.address <= address and address + size <= arena.address + arena.byte_count
    ]
    assert len(inside) == len(mapped), "E1: every mapped range is in the memory of one buffer"
    real.submit(MARKED)
    real.engine.run_until_idle()
    for arena in real.arenas.values():
        with pytest.raises(BufferError):
            arena.mapping.resize(2 * arena.byte_count)
        with pytest.raises(BufferError):
            arena.mapping.close()
    real.run()
    real.close()


def tokens_in(steps: list[Step]) -> dict[int, list[int]]:
    """Return the tokens that jobs gave each request, as the journal's inputs tell them."""
    owners: dict[int, list[int]] = {}
    tokens: dict[int, list[int]] = {}
    for step in steps:
        if isinstance(step.taken, Completed) and step.taken.job in owners:
            for owner, row in zip(owners[step.taken.job], step.taken.rows, strict=True):
                tokens.setdefault(owner, []).append(row.token)
        for event in step.events:
            if (event.machine, event.trigger) == ("job", "plan"):
                if event.data["origin"] == "request":
                    owners[event.entities[0]] = list(event.data["owners"])
    return tokens


@pytest.mark.parametrize("clock", ["virtual", "real"])
def test_the_file_of_a_run_proves_it_and_goes_on(calbin: Path, tmp_path: Path, clock: str) -> None:
    """Two incarnations in one file: it verifies, folds to the live state and has every token."""
    file = tmp_path / "run.db"
    random = np.random.default_rng(12)
    wanted: list[tuple[int, ...]] = []
    for _ in range(2):
        real = RealEngine(calbin, url=f"sim:tiny?clock={clock}", journal=open_journal(file))
        asks = [attrs.evolve(draw_ask(random, tokens_max=8), ignore_eos=True) for _ in range(3)]
        for ask in asks:
            real.submit(ask)
        results = real.results()
        assert outcomes(results) == [answer_alone(calbin, ask) for ask in asks]
        real.close()
        live = freeze(real.engine._state)
        wanted += [result.tokens for result in results]
        with open_journal(file, read_only=True) as journal:
            steps = check_journal(journal)
            sums = stats(journal)
        folded = initial_state()
        for step in steps:
            fold(folded, step)
        assert freeze(folded) == live
    assert [tuple(tokens) for _, tokens in sorted(tokens_in(steps).items())] == wanted
    assert sums["incarnations"] == 2
    assert sums["requests"]["finished"] == 6
    assert sums["tokens"] == sum(map(len, wanted))
