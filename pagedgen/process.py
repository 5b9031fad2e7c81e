"""How a process of the command line uses cores and memory. Nothing here imports torch: most of it must come first."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# About 0.2 ms on the machines this was measured on: longer than the gaps between the parallel regions of a step.
SPIN_COUNT = 5000

# What glibc's mallopt calls them, and its largest mmap threshold.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MMAP_THRESHOLD = 32 << 20
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20
_HEAP_ON_HUGE_PAGES = 1 << 30  # address space only: memory is taken when it is first written
_TOP_PAD = 16 << 20


def prepare_process() -> None:
    """Set the process up for a run on a CPU; what the user has set in the environment stays."""
    limit_spinning()
    use_huge_pages()


def limit_spinning() -> None:
    """Let a thread that waits for the others of a parallel region spin for a moment only, then give its core away.

    GNU OpenMP, which torch brings, spins for milliseconds: then one other busy process on the machine slows each of the
    hundreds of short regions of a step down, by a factor of ten and more. Not spinning at all would cost a sleep and a
    wake-up for each region. Read when torch is loaded, so this comes before.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def use_huge_pages() -> None:
    """Ask for huge pages where weights, KV pool and activations will lie, and keep freed memory for the next step.

    A step reads all of the weights and of the live KV, and with pages of 4 KiB much of the time is address translation:
    huge pages make such a read about 1.5 times as fast. torch asks for them itself for tensors of 2 MiB and more when
    its variable says so, which it reads at its first allocation; a set 0 switches all of this off. Smaller ones come
    from the heap, so a stretch of it is marked. And glibc would hand the memory of large activations back to the system
    after each use, to be faulted in and zeroed again by the next step. Elsewhere than on Linux with glibc: nothing.
    """
    if os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1") == "0" or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    try:
        mallopt, sbrk, malloc, free, madvise = libc.mallopt, libc.sbrk, libc.malloc, libc.free, libc.madvise
    except AttributeError:  # a C library without them
        return
    sbrk.restype = malloc.restype = ctypes.c_void_p
    free.argtypes, madvise.argtypes = (ctypes.c_void_p,), (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, _HEAP_ON_HUGE_PAGES)
    begin = -(-sbrk(0) // _HUGE_PAGE) * _HUGE_PAGE
    free(malloc(_TOP_PAD))  # larger than what the heap has left: it grows, by the pad too
    end = sbrk(0)
    mallopt(_M_TOP_PAD, _TOP_PAD)
    if end > begin:
        madvise(begin, end - begin, _MADV_HUGEPAGE)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from going through all that is imported and loaded, over and over while it grows, and
    again during the run: none of it is garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(20_000)  # the rows that wait to be written are no garbage either
        gc.enable()


@contextmanager
def collector_restored() -> Iterator[None]:
    """Afterwards the garbage collector is as it was, for whoever runs jobs in a process that goes on."""
    threshold = gc.get_threshold()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
