"""Operators that train: updates of parameters, dense and sparse, and learning rates.

In: arrays and Arguments of an operator. Out: arrays. Read `updates.py` first.
"""
