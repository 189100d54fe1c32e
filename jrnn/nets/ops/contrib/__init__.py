"""Operators that recurrent networks do not need: images, detection, quantized numbers, sparse features, rare optimizers."""
