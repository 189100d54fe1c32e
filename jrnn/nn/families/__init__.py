"""Recurrent layers since 2018, one file for each family; `jrnn.nn.recurrent` has their interface."""
