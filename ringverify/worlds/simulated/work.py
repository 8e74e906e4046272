"""Handles of operations under way: torch's `Work` and its futures, for ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringverify.worlds.simulated.exchange import Exchange
from ringverify.worlds.simulated.operations import Operation, Receive


class SimulatedFuture(torch.futures.Future[Any]):
    """A future whose `wait` lets the other ranks run."""

    def __init__(self, wait: Callable[[], Any], poll: Callable[[], bool]) -> None:
        super().__init__()
        self._wait, self._poll = wait, poll

    def done(self) -> bool:
        """Whether it has completed, after letting others go on if it has not."""
        return bool(self._poll() and super().done())

    def wait(self) -> Any:
        """Let other ranks run until the operation is complete, and return the value."""
        self._wait()
        return super().wait()

    def value(self) -> Any:
        """Return the value of an operation that is complete."""
        self._poll()
        return super().value()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Return a future of what `callback` returns for this one."""
        following = SimulatedFuture(self._wait, self._poll)

        def follow(future: torch.futures.Future[Any]) -> None:
            try:
                following.set_result(callback(future))
            except Exception as error:
                following.set_exception(error)

        self.add_done_callback(follow)
        return following


class SimulatedWork(dist.Work):
    """The handle of one operation of one rank."""

    def __init__(self, exchange: Exchange, operation: Operation, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._exchange = exchange
        self._operation = operation
        self._outputs = outputs
        self._future: SimulatedFuture | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let other ranks run until the operation is complete, and write its buffers. The timeout is ignored.

        Raises:
            RuntimeError: the ranks do not agree about sizes.
        """
        try:
            self._exchange.finish(self._operation)
        except Exception as error:
            self._settle(error)
            raise
        self._settle(None)
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation is complete. If so its buffers are written; if not, another rank may go on first."""
        if not self._exchange.poll(self._operation):
            return False
        self._settle(self._operation.error)
        return True

    def is_success(self) -> bool:
        """Whether the operation is complete and went well."""
        return self._operation.finished and self._operation.error is None

    def exception(self) -> Any:
        """Return the operation's error, or `None`."""
        return self._operation.error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation writes."""
        return self._outputs

    def source_rank(self) -> int:
        """The group rank of the sender, once a receive is matched."""
        return self._source_rank()

    def _source_rank(self) -> int:
        if not isinstance(self._operation, Receive) or self._operation.source is None:
            raise RuntimeError("only a receive that has completed has a source rank")
        return self._operation.source

    def get_future(self) -> Any:
        """Return a future of the tensors that the operation writes."""
        if self._future is None:
            self._future = SimulatedFuture(self.wait, self.is_completed)
            if self._operation.finished:
                self._settle(self._operation.error)
        return self._future

    def _settle(self, error: Exception | None) -> None:
        future = self._future
        if future is not None and not torch.futures.Future.done(future):
            if error is None:
                future.set_result(self._outputs)
            else:
                future.set_exception(error)
