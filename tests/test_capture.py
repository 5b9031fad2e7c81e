"""Captures of CUDA graphs, over a stand-in for the device: what one that fails leaves behind is undone."""

import gc

import pytest
import torch
from fake_cuda import POOL, Cuda

from pagedgen.execution.capture import CudaCapture, NotCapturable, capture_graph

REFUSED = "CUDA error: operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA"


def test_work_is_done_once_before_it_is_captured(monkeypatch):
    cuda, runs = Cuda(monkeypatch), []
    replay = CudaCapture()(lambda: runs.append((cuda.stream, gc.isenabled())))
    assert runs == [("own", True), ("capturing", False)]  # a collection could free what other graphs hold
    assert gc.isenabled()
    assert cuda.modes == ["thread_local"]
    assert cuda.is_as_before
    replay()
    assert cuda.replayed == 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [(RuntimeError(REFUSED), NotCapturable), (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError)],
)
def test_after_a_capture_that_fails_the_device_is_as_before(monkeypatch, error, raised):
    cuda = Cuda(monkeypatch)
    earlier = capture_graph(lambda: None, POOL)
    cuda.error = error
    with pytest.raises(raised, match=str(error).split("\n")[0]):
        capture_graph(lambda: None, POOL)
    assert cuda.is_as_before
    assert gc.isenabled()
    earlier.replay()
    cuda.error = None
    capture_graph(lambda: None, POOL).replay()
    assert cuda.replayed == 2


def test_an_allocator_that_has_ended_the_capture_is_left_alone(monkeypatch):
    """As torch's does from 2.13 on."""
    cuda = Cuda(monkeypatch, RuntimeError(REFUSED))
    with pytest.raises(NotCapturable):
        capture_graph(cuda.pools.clear, POOL)
    assert cuda.is_as_before


def test_a_device_that_failed_meanwhile_says_so(monkeypatch):
    cuda = Cuda(monkeypatch, RuntimeError(REFUSED))
    cuda.failed = RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        capture_graph(lambda: None, POOL)
    assert not isinstance(caught.value, NotCapturable)


def test_collection_stays_off_where_it_was(monkeypatch):
    Cuda(monkeypatch)
    gc.disable()
    try:
        capture_graph(lambda: None, POOL)
        assert not gc.isenabled()
    finally:
        gc.enable()
