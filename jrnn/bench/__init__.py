"""Benchmarks: `jrnn.scan` next to its peers, in the same process, interleaved.

In: cells and sizes by name, or a step of the user. Out: times, memory and ratios, as tables and JSON. Read `measure.py`
first.
"""
