"""Which denoising step is running: told by whoever owns the loop, never inferred from timesteps or call counts."""

from __future__ import annotations

from collections.abc import Callable


class StepClock:
    """Counts the steps of one request: `start(total)`, then one `advance()` after each step.

    `step` is None outside [start, last advance]. `on_start` and `on_stop` are called at every start and after every
    end, so that what was kept for a request goes with it.
    """

    def __init__(self) -> None:
        self.total: int | None = None
        self.step: int | None = None
        self.on_start: list[Callable[[], None]] = []
        self.on_stop: list[Callable[[], None]] = []

    def start(self, total: int) -> None:
        """Begin a request of `total` steps at step 0; an unfinished one is ended first.

        A listener that raises leaves no request running.
        """
        if total < 1:
            raise ValueError(f"a request needs at least one step, got {total}")
        self.stop()
        self.total, self.step = total, 0
        try:
            for call in self.on_start:
                call()
        except BaseException:
            self.stop()
            raise

    def advance(self) -> None:
        """The current step is done; after the last one the request is over."""
        if self.step is None:
            return
        self.step += 1
        if self.step == self.total:
            self.stop()

    def stop(self) -> None:
        """End the request, finished or not; without one, nothing happens."""
        if self.step is None:
            return
        self.step = None
        for call in self.on_stop:
            call()
