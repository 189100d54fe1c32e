"""The sorts of the C++ standard library (libstdc++), which determine the order of equal elements.

Scores that saturate at 1 are equal, and the order of such boxes decides which of them a detection network keeps. Caffe2
sorts with `std::sort` and `std::partial_sort`. They are not stable but deterministic; these functions follow their steps.
"""

import numpy as np

_SMALL = 16  # std::sort uses insertion sort up to this size


def descending(scores: np.ndarray, most: int | None = None) -> np.ndarray:
    """The indices of the scores in descending order, as by `std::sort`; only the first `most`, as by `std::partial_sort`.

    >>> descending(np.array([1.0, 3.0, 2.0])).tolist()
    [1, 2, 0]
    """
    if most is not None and most >= len(scores):
        most = None
    if len(np.unique(scores)) == len(scores):
        return np.argsort(-scores, kind="stable")[:most]
    keys = (-scores).tolist()
    order = list(range(len(keys)))
    if most is None:
        _introsort(order, keys, 0, len(order), 2 * max(len(order).bit_length() - 1, 0))
        for k in range(1, len(order)):
            _insert(order, keys, k)
        return np.array(order, np.int64)
    _partial_sort(order, keys, 0, most, len(order))
    return np.array(order[:most], np.int64)


def _insert(order: list[int], keys: list[float], k: int) -> None:
    value = order[k]
    while k > 0 and keys[value] < keys[order[k - 1]]:
        order[k] = order[k - 1]
        k -= 1
    order[k] = value


def _introsort(order: list[int], keys: list[float], first: int, last: int, depth: int) -> None:
    while last - first > _SMALL:
        if depth == 0:
            _partial_sort(order, keys, first, last, last)
            return
        depth -= 1
        cut = _partition(order, keys, first, last)
        _introsort(order, keys, cut, last, depth)
        last = cut


def _partition(order: list[int], keys: list[float], first: int, last: int) -> int:
    """Moves the median of three to the front and smaller elements before the others; returns where the others begin."""
    a = first + 1
    b = first + (last - first) // 2
    c = last - 1
    ka, kb, kc = (keys[order[k]] for k in (a, b, c))
    if ka < kb:
        median = b if kb < kc else c if ka < kc else a
    else:
        median = a if ka < kc else c if kb < kc else b
    order[first], order[median] = order[median], order[first]
    pivot = keys[order[first]]
    low = first + 1
    high = last
    while True:
        while keys[order[low]] < pivot:
            low += 1
        high -= 1
        while pivot < keys[order[high]]:
            high -= 1
        if low >= high:
            return low
        order[low], order[high] = order[high], order[low]
        low += 1


def _partial_sort(order: list[int], keys: list[float], first: int, middle: int, last: int) -> None:
    """Sorts the least of [first, last) into [first, middle), by a heap."""
    size = middle - first
    for hole in range((size - 2) // 2, -1, -1):
        _sift(order, keys, first, hole, size, order[first + hole])
    for k in range(middle, last):
        if keys[order[k]] < keys[order[first]]:
            value, order[k] = order[k], order[first]
            _sift(order, keys, first, 0, size, value)
    for end in range(size - 1, 0, -1):
        value, order[first + end] = order[first + end], order[first]
        _sift(order, keys, first, 0, end, value)


def _sift(
    order: list[int], keys: list[float], first: int, hole: int, size: int, value: int
) -> None:
    """Fills a hole of a heap: moves greater children up, then moves the value up from the bottom."""
    top = hole
    child = hole
    while child < (size - 1) // 2:
        child = 2 * (child + 1)
        if keys[order[first + child]] < keys[order[first + child - 1]]:
            child -= 1
        order[first + hole] = order[first + child]
        hole = child
    if size % 2 == 0 and child == (size - 2) // 2:
        child = 2 * (child + 1)
        order[first + hole] = order[first + child - 1]
        hole = child - 1
    parent = (hole - 1) // 2
    while hole > top and keys[order[first + parent]] < keys[value]:
        order[first + hole] = order[first + parent]
        hole = parent
        parent = (parent - 1) // 2
    order[first + hole] = value
