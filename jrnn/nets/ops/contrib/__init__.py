"""Operators that recurrent networks do not need: images, detection, quantized numbers, sparse features, rare optimizers.

In: arrays and Arguments of an operator. Out: arrays. Read `norm.py` first.
"""
