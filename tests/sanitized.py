"""Runs tests of the kernels in a process that was started with a sanitizer's runtime: python sanitized.py TEST...

The kernels start threads of their own, as many as a test asks for, and torch none: a sanitizer knows nothing of how the
threads of an OpenMP runtime wait for each other, which was compiled without it.
"""

import sys

import pytest
import torch
from pagedgen_kernels.cpu import library

if __name__ == "__main__":
    torch.set_num_threads(1)
    threads = [3]
    torch.set_num_threads = lambda count: threads.__setitem__(0, count)
    torch.get_num_threads = lambda: threads[0]
    library._openmp_entry = lambda: None
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
