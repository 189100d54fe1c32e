"""Operators over images: convolutions, pooling, normalization of channels, and rearrangement.

In: arrays and Arguments of an operator. Out: arrays. Read `windows.py` first.
"""
