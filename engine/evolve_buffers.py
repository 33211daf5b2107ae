"""What an event of a buffer changes: the buffer, and the list of the free ones of its submodel."""

import heapq

from laneway.engine.inputs import Input
from laneway.engine.state import State
from laneway.statemachines import Event


def evolve_buffer(state: State, event: Event, taken: Input) -> None:
    """Move buffers."""
    for number in event.entities:
        buffer = state.buffers[number]
        buffer.state = event.dest
        free = state.models[buffer.model].free_buffers[buffer.submodel]
        if event.source == "free":
            take_buffer(free, number)
        if event.trigger == "acquire":
            buffer.job = event.data["job"]
        elif event.trigger == "rebuild":
            buffer.epoch, buffer.generation = event.epoch, event.generation
        if event.dest == "free":
            buffer.job = None
            heapq.heappush(free, number)


def take_buffer(free: list[int], number: int) -> None:
    """Take a buffer out of the heap of the free ones."""
    free.remove(number)
    heapq.heapify(free)
