"""What stands for torch.cuda where there is no such device: captures, their failures, and events."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

POOL = (0, 7)


class Cuda:
    """error: what a capture ends with, if it fails; it then leaves its stream, its pool and the random generator as
    torch 2.11 does. failed: what the device has failed with. now: ms, of which each event takes five."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: RuntimeError | None = None) -> None:
        self.error = error
        self.failed: RuntimeError | None = None
        self.stream, self.generator_captures = "own", False
        self.pools: list[Any] = []
        self.modes: list[str] = []
        self.replayed = self.now = 0
        for name, fake in (*self._graphs().items(), *self._events().items()):
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end_pool, raising=False)

    @property
    def is_as_before(self) -> bool:
        return (self.stream, self.pools, self.generator_captures) == ("own", [], False)

    def _graphs(self) -> dict[str, Any]:
        cuda = self

        class Graph:
            def replay(self) -> None:
                assert not cuda.generator_captures
                cuda.replayed += 1

        @contextmanager
        def graph(of: Graph, pool: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
            assert isinstance(of, Graph)
            assert cuda.stream == "own"
            assert not cuda.pools  # it frees memory first, which torch refuses during a capture
            cuda.modes.append(capture_error_mode)
            cuda.stream, cuda.generator_captures = "capturing", True
            cuda.pools.append(pool)
            yield
            if cuda.error is not None and pool is not None:
                raise cuda.error
            cuda.pools.remove(pool)
            cuda.stream, cuda.generator_captures = "own", False

        def set_stream(stream: str) -> None:
            cuda.stream = stream

        return {
            "CUDAGraph": Graph,
            "graph": graph,
            "graph_pool_handle": lambda: POOL,
            "current_device": lambda: 0,
            "current_stream": lambda: cuda.stream,
            "set_stream": set_stream,
        }

    def _events(self) -> dict[str, Any]:
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = -1

            def record(self) -> None:
                cuda.now += 5
                self.at = cuda.now

            def synchronize(self) -> None:
                assert self.at > 0

            def elapsed_time(self, end: "Event") -> float:
                return end.at - self.at

        def synchronize() -> None:
            if cuda.failed is not None:
                raise cuda.failed

        return {"Event": Event, "synchronize": synchronize}

    def _end_pool(self, device: int, pool: Any) -> None:
        assert device == 0
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)
