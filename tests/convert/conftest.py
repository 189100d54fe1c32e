"""The models that are converted are written as users write them: a bias is added to a matrix without a reshape."""

import jax
import pytest


@pytest.fixture(autouse=True)
def users_promote_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield
