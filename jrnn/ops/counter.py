"""Counters, held in blobs. They change in place, so they cannot run in a traced loop or branch."""

import numpy as np

from jrnn.errors import OpError
from jrnn.registry import op


class Counter:
    """An integer that operators change in place; Caffe2's is 64 bits wide."""

    def __init__(self, count: int):
        self.count = count


def _checked(counter, context) -> Counter:
    if not isinstance(counter, Counter):
        raise OpError(f"its input must be a counter, made by CreateCounter; it is {type(counter).__name__}")
    if context.in_branch:
        raise OpError(
            "a counter changes in place, which a traced loop or branch cannot do; run the net with run_net, or count in an "
            "integer blob"
        )
    return counter


@op("CreateCounter", gradient="forbidden")
def create_counter(*, init_count: int = 0):
    if init_count < 0:
        raise OpError(f"argument 'init_count' is {init_count}; a counter starts at 0 or above")
    return Counter(init_count)


@op("ResetCounter", outputs=(0, 1), gradient="forbidden", updates=(0,))
def reset_counter(counter, *, init_count: int = 0, context):
    before, _checked(counter, context).count = _checked(counter, context).count, init_count
    return np.asarray(before, np.int64)


@op("CountDown", gradient="forbidden", updates=(0,))
def count_down(counter, *, context):
    """False while there was something to count, then True; goes on below zero."""
    _checked(counter, context).count -= 1
    return np.asarray(counter.count < 0)


@op("CountUp", gradient="forbidden", updates=(0,))
def count_up(counter, *, context):
    """The count before it went up."""
    _checked(counter, context).count += 1
    return np.asarray(counter.count - 1, np.int64)


@op("RetrieveCount", gradient="forbidden")
def retrieve_count(counter, *, context):
    return np.asarray(_checked(counter, context).count, np.int64)
