"""Operators that recurrent networks do not need: quantized ones, detection, rows of few bits, features of rankers, ATen."""

from jrnn.ops.contrib import aten, detection, fused, int8, int8_layers, ranking, roi_align, row_quantized
