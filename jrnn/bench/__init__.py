"""Benchmarks: `jrnn.scan` beside its peers, in the same process and in turns."""
