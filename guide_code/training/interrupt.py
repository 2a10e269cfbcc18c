"""Ctrl-C and SIGTERM end a run after the step that they come in, so that it can be saved."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """A list that Ctrl-C or SIGTERM (schedulers send it) fills, so that a step always ends; a second one stops now."""
    received: list[int] = []

    def handle(number, frame):
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, handle)
    except ValueError:  # not in the main thread: nothing to catch
        pass
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
