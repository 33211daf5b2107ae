"""Latencies of requests counted again, in the plainest way: every value in a list.

What a request had before a step and has after it is told by the state, which other code folds; so
an instant of a token is a step in which it has one more. Nothing is shared between requests, and
every live one is looked at in every step.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

import attrs

from laneway.engine.distribution import Distribution
from laneway.engine.evolve import fold
from laneway.engine.inputs import RequestSubmitted
from laneway.engine.picture import PREFIX, MetricsPicture
from laneway.engine.ports import Step
from laneway.engine.state import JobState, State, initial_state

BOUNDS = (("32", 32), ("128", 128), ("512", 512), ("2048", 2048), ("8192", 8192))
NAMES = (
    *("turn_wait_seconds", "job_seconds", "inter_token_latency_seconds"),
    *("time_to_first_token_seconds", "e2e_request_latency_seconds"),
    *("request_decode_time_seconds", "request_time_per_output_token_seconds"),
)


@attrs.define
class Life:
    """One admitted request so far. Units: ns."""

    bucket: str
    admitted: int
    idle_since: int
    tokens: list[int] = attrs.Factory(list)


@attrs.define
class Recount:
    """The values of each series: by the name of its family, the task if it has one, the bucket."""

    values: defaultdict[tuple[str, ...], list[int]] = attrs.Factory(lambda: defaultdict(list))
    generation_tokens: int = 0
    _state: State = attrs.Factory(initial_state)
    _lives: dict[int, Life] = attrs.Factory(dict)

    def take(self, step: Step) -> None:
        """Count one more step."""
        requests = {n: len(one.tokens) for n, one in self._state.requests.items()}
        jobs = _of_requests(self._state.jobs.values())
        fold(self._state, step)
        after = self._state.requests
        for event in step.events:
            if (event.machine, event.trigger) == ("request", "admit"):
                assert isinstance(step.taken, RequestSubmitted)
                bucket = _bucket(len(step.taken.prompt))
                self._lives[event.entities[0]] = Life(bucket, step.at_ns, step.at_ns)
        self._end_jobs(jobs, step)
        self._plan_jobs(jobs, step)
        for number, had in requests.items():
            has = _tokens_at_end(number, step) if number not in after else len(after[number].tokens)
            assert has - had in (0, 1), f"request/{number} went from {had} tokens to {has}"
            if has > had:
                self._token(self._lives[number], step.at_ns)
        for number in requests.keys() - after.keys():
            self._end(self._lives.pop(number), step.at_ns)

    def _end_jobs(self, jobs: dict[int, JobState], step: Step) -> None:
        """Take the jobs that are gone: what they took counts if their results did."""
        counted = {
            number
            for event in step.events
            if (event.machine, event.trigger) == ("job", "complete")
            for number in event.entities
            if not event.data.get("withheld")
        }
        for number, job in jobs.items():
            if number in self._state.jobs:
                continue
            for row in job.rows:
                life = self._lives.get(row.owner)
                if life is None:
                    continue
                life.idle_since = step.at_ns
                if number in counted:
                    took = step.at_ns - job.planned_ns
                    self.values["job_seconds", job.task, life.bucket].append(took)

    def _plan_jobs(self, jobs: dict[int, JobState], step: Step) -> None:
        for number, job in _of_requests(self._state.jobs.values()).items():
            if number not in jobs:
                for row in job.rows:
                    life = self._lives[row.owner]
                    waited = step.at_ns - life.idle_since
                    self.values["turn_wait_seconds", job.task, life.bucket].append(waited)

    def _token(self, life: Life, at_ns: int) -> None:
        if life.tokens:
            between = at_ns - life.tokens[-1]
            self.values["inter_token_latency_seconds", life.bucket].append(between)
        else:
            first = at_ns - life.admitted
            self.values["time_to_first_token_seconds", life.bucket].append(first)
        life.tokens.append(at_ns)
        self.generation_tokens += 1

    def _end(self, life: Life, at_ns: int) -> None:
        self.values["e2e_request_latency_seconds", life.bucket].append(at_ns - life.admitted)
        if not life.tokens:
            return
        decode = life.tokens[-1] - life.tokens[0]
        self.values["request_decode_time_seconds", life.bucket].append(decode)
        if (gaps := len(life.tokens) - 1) > 0:
            mean = decode // gaps
            self.values["request_time_per_output_token_seconds", life.bucket].append(mean)


def _of_requests(jobs: Iterable[JobState]) -> dict[int, JobState]:
    return {job.number: job for job in jobs if job.origin == "request"}


def _tokens_at_end(number: int, step: Step) -> int:
    """Return how many tokens a request had at its ending."""
    (tokens,) = (
        event.data["tokens"]
        for event in step.events
        if event.machine == "request" and number in event.entities and "tokens" in event.data
    )
    return int(tokens)


def _bucket(tokens: int) -> str:
    for name, bound in BOUNDS:
        if tokens <= bound:
            return name
    return "more"


def check_recount(told: MetricsPicture, steps: Iterable[Step]) -> Recount:
    """Hold a picture against a recount of its steps: every count, every sum, and nothing beside."""
    recount = Recount()
    for step in steps:
        recount.take(step)
    tokens = sum(_series(told, "generation_tokens_total"))
    assert tokens == recount.generation_tokens
    for name in NAMES:
        expected = {key: values for key, values in recount.values.items() if key[0] == name}
        whole = told.value(name)
        assert isinstance(whole, Distribution)
        assert whole.count == sum(map(len, expected.values())), name
        for key, values in expected.items():
            task = {"task": key[1]} if len(key) == 3 else {}
            found = told.value(name, bucket=key[-1], **task)
            assert isinstance(found, Distribution)
            limits = (float("-inf"), *found.bounds, float("inf"))
            counts = tuple(
                sum(low < value <= high for value in values) for low, high in pairwise(limits)
            )
            assert (found.counts, found.total) == (counts, sum(values)), key
    return recount


def _series(told: MetricsPicture, name: str) -> list[int]:
    """Return the value of a counter for each generation."""
    (family,) = (family for family in told.families if family.name == PREFIX + name)
    return [value for _, value in family.series if isinstance(value, int)]
