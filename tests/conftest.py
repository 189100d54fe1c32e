"""Strict settings for every test: rank promotion raises, and 64-bit types are asked for, never assumed."""

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    """64-bit types for the length of one test, for proofs of gradients."""
    with jax.enable_x64(True):
        yield
