"""Measurements, run as modules: `python -m benchmarks.throughput`. Results go to build/bench/."""
