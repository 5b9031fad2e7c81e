"""Triton kernels for GPUs behind the launchers of `pagedgen_kernels.reference`, which they fall back to."""
