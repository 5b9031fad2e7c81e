"""Work for a CUDA device as a graph, and the device as it was before where that cannot be."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from pagedgen.execution.failures import is_out_of_memory

Pool = Any  # what torch.cuda.graph_pool_handle gives


class NotCapturable(RuntimeError):
    """Work that a graph cannot hold. The device goes on, unlike after other errors that name CUDA."""


class CudaCapture:
    """Captures work for a CUDA device as graphs that share one pool of memory: they are replayed one after the other,
    and of what one of them computes only the tensors that are still held keep their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()  # compiles kernels and sets libraries up, which a capture does not allow
        torch.cuda.synchronize()
        return capture_graph(run, self._pool).replay


def capture_graph(run: Callable[[], object], pool: Pool) -> torch.cuda.CUDAGraph:
    """The graph of the work that `run` gives the current device, with its memory in the pool.

    Raises NotCapturable where there can be none; with that, and where memory does not suffice, all is as before.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # What other threads do with the device is none of the capture's, and a collection in the middle of it would
        # free tensors and graphs of others.
        with _no_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
    except RuntimeError as error:
        _give_up(stream, pool)
        if is_out_of_memory(error):
            raise
        raise NotCapturable(str(error)) from error
    return graph


def _give_up(stream: torch.cuda.Stream, pool: Pool) -> None:
    """Undo what a capture that fails leaves behind: its own stream as the current one and, by torch before 2.13, an
    allocator that gives nothing back and a random generator that refuses to go on, which each replay asks too."""
    torch.cuda.set_stream(stream)
    with suppress(RuntimeError):  # where the allocator has ended it
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of graphs that hold nothing
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            pass  # the end of a capture is what lets the generator go on


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
