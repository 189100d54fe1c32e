"""Benchmarks: `jrnn.scan` next to its peers, in the same process, interleaved."""
