"""Kernels that run a whole loop: `native` for CPUs, in C++."""
