"""Other engines as contestants of `benchmarks.throughput`, one module each, called as for their best speed.

Each runs with the interpreter of its own environment: besides the standard library and `benchmarks.serving`, nothing is
imported but the engine itself and what it brings, and that inside functions.
"""
