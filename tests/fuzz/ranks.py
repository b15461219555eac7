"""All ranks of one call in this process: a thread each, taking turns, and an exchange that copies between them.

A rank runs until its next exchange and then lets another one go, so a case runs the same way every time. What only a
process group has (votes, heartbeats) is left out; the tests over Gloo have it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Meeting:
    """Where the ranks of one call exchange."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.exchanges = 0
        """Exchanges that every rank has reached."""
        self.posted: list[tuple[Tensor, ...]] = [()] * degree
        self._turn = threading.Lock()
        self._barrier = threading.Barrier(degree, timeout=300)

    def run(self, call: Callable[[SimulatedAxis], Result]) -> list[Result | BaseException]:
        """What `call` returned or raised on each rank; a rank whose peer raised raises BrokenBarrierError."""
        outcomes: list[Result | BaseException] = [RuntimeError("did not run")] * self.degree

        intra_op = torch.get_num_threads()

        def rank(number: int) -> None:
            torch.set_num_threads(intra_op)  # matrix products of a new thread would take every core, and other sums
            with self._turn, torch.no_grad():
                try:
                    outcomes[number] = call(SimulatedAxis(self, number))
                except BaseException as error:
                    outcomes[number] = error
                    self._barrier.abort()

        if self.degree == 1:
            rank(0)
            return outcomes
        threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.degree)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def wait(self) -> None:
        """Let the others run until all of them are here."""
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()


class SimulatedAxis:
    """In place of `exchange.Axis`: one rank of a meeting."""

    group = None

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.degree = meeting.degree
        self._meeting = meeting

    def all_to_all(self, recv: Tensor, send: Tensor, recv_splits: list[int], send_splits: list[int]) -> None:
        """See `exchange.Axis.all_to_all`; also checks what a transport takes without an error."""
        meeting = self._meeting
        assert recv.is_contiguous() and send.is_contiguous() and recv.dtype == send.dtype
        assert sum(recv_splits) == recv.shape[0] and sum(send_splits) == send.shape[0]
        meeting.posted[self.rank] = send.split(send_splits)
        meeting.wait()
        parts = [meeting.posted[peer][self.rank] for peer in range(self.degree)]
        assert [len(part) for part in parts] == list(recv_splits), "the ranks disagree on split sizes"
        recv.copy_(torch.cat(parts))
        meeting.wait()
        if self.rank == 0:
            meeting.exchanges += 1
