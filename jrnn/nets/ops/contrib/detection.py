"""Boxes of detection networks: proposals from anchors, box deltas, and non-maximum suppression.

Shapes: N images, A anchors, R boxes, K classes; a box is (x1, y1, x2, y2), or rotated (center x, center y, width, height,
degrees). The number of boxes that are kept depends on values, so these operators compute with numpy, outside of traces.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jrnn.errors import OpError
from jrnn.nets.ops.contrib.unstable_sort import descending
from jrnn.nets.ops.values import check_rank, check_shape, describe, raise_if, takes
from jrnn.nets.registry import op

_LARGEST_GROWTH = np.float32(math.log(1000.0 / 16.0))  # of a box's logarithmic width


def _floats(**blobs: Any) -> Iterator[np.ndarray]:
    for name, value in blobs.items():
        array = np.asarray(value)
        if array.dtype != np.float32:
            raise OpError(f"{name} is {describe(array)}; it must be float32")
        yield array


def _moved(
    boxes: np.ndarray,
    deltas: np.ndarray,
    weights: np.ndarray,
    plus: np.float32,
    bound: tuple | None,
) -> np.ndarray:
    """Boxes moved by (dx, dy) in units of width and height, scaled by exp(dw, dh), and rotated by radians."""
    if boxes.shape[1] == 5:
        x, y, width, height, angle = boxes.T
    else:
        width = boxes[:, 2] - boxes[:, 0] + plus
        height = boxes[:, 3] - boxes[:, 1] + plus
        x = boxes[:, 0] + np.float32(0.5) * width
        y = boxes[:, 1] + np.float32(0.5) * height
    dx, dy, dw, dh = (deltas[:, k] / weights[k] for k in range(4))
    x = dx * width + x
    y = dy * height + y
    width = np.exp(np.minimum(dw, _LARGEST_GROWTH)) * width
    height = np.exp(np.minimum(dh, _LARGEST_GROWTH)) * height
    if boxes.shape[1] == 5:
        angle = deltas[:, 4] * np.float32(180 / math.pi) + angle
        if bound is not None:
            low, high = bound
            if (high - low) <= 0 or (high - low) % 180:
                raise OpError(
                    f"angle_bound_lo {low} and angle_bound_hi {high} must be a multiple of 180 degrees apart"
                )
            angle = np.where(
                angle < low,
                angle + (high - low),
                np.where(angle > high, angle - (high - low), angle),
            )
        return np.stack([x, y, width, height, angle], 1).astype(np.float32)
    half_width = np.float32(0.5) * width
    half_height = np.float32(0.5) * height
    return np.stack(
        [x - half_width, y - half_height, x + half_width - plus, y + half_height - plus], 1
    )


def _clipped(
    boxes: np.ndarray, height: float, width: float, plus: np.float32, upright: float
) -> np.ndarray:
    """Boxes clipped to an image; rotated ones only if their angle is at most `upright` degrees."""
    limits = np.array([width - plus, height - plus] * 2, np.float32)
    if boxes.shape[1] == 4:
        return np.maximum(np.minimum(boxes, limits), 0)
    near = np.abs(boxes[:, 4]) <= upright
    center = boxes[near, :2]
    half = (boxes[near, 2:4] - plus) / np.float32(2)
    low = np.maximum(np.minimum(center - half, limits[:2]), 0)
    high = np.maximum(np.minimum(center + half, limits[:2]), 0)
    clipped = boxes.copy()
    clipped[near, :4] = np.concatenate([(low + high) / np.float32(2), high - low + plus], 1)
    return clipped


def _overlaps(boxes: np.ndarray, k: int, others: np.ndarray, plus: np.float32) -> np.ndarray:
    """The intersection over union of box k with each of the others."""
    raise_if(
        boxes.shape[1] == 5,
        "overlaps are computed among upright boxes alone, and these are rotated",
    )
    areas = (boxes[:, 2] - boxes[:, 0] + plus) * (boxes[:, 3] - boxes[:, 1] + plus)
    low = np.maximum(boxes[others, :2], boxes[k, :2])
    high = np.minimum(boxes[others, 2:], boxes[k, 2:])
    sides = np.maximum(high - low + plus, 0)
    shared = sides[:, 0] * sides[:, 1]
    with np.errstate(invalid="ignore", divide="ignore"):
        return shared / (areas[k] + areas[others] - shared)


def _without_overlaps(
    boxes: np.ndarray, order: np.ndarray, most_shared: float, most: int, plus: np.float32
) -> np.ndarray:
    """Non-maximum suppression: a kept box removes the later ones in `order` that overlap it by more than `most_shared`."""
    kept: list[int] = []
    while order.size and (most < 0 or len(kept) < most):
        first = order[0]
        rest = order[1:]
        kept.append(first)
        order = rest[_overlaps(boxes, first, rest, plus) <= np.float32(most_shared)]
    return np.array(kept, np.int64)


def _adjust(
    *,
    angle_bound_on: bool = True,
    angle_bound_lo: int = -90,
    angle_bound_hi: int = 90,
    clip_angle_thresh: float = 1.0,
    legacy_plus_one: bool = True,
) -> tuple[np.float32, Callable[..., np.ndarray]]:
    """What legacy_plus_one adds to sides, and a function that moves boxes by deltas and clips them to an image."""
    plus = np.float32(legacy_plus_one)
    bound = (angle_bound_lo, angle_bound_hi) if angle_bound_on else None

    def adjusted(
        boxes: np.ndarray, deltas: np.ndarray, weights: np.ndarray, height: float, width: float
    ) -> np.ndarray:
        return _clipped(
            _moved(boxes, deltas, weights, plus, bound), height, width, plus, clip_angle_thresh
        )

    return plus, adjusted


@takes(adjust=_adjust)
def _generate_proposals(
    scores,
    bbox_deltas,
    im_info,
    anchors,
    *,
    adjust,
    spatial_scale: float = 0.0625,
    pre_nms_topN: int = 6000,
    post_nms_topN: int = 300,
    nms_thresh: float = 0.7,
    min_size: float = 16.0,
):
    """Scores [N, A, H, W], deltas [N, 4 A, H, W], (height, width, scale) [N, 3] and anchors [A, 4] as boxes.

    Returns the boxes [R, 5], with the image number first, and their scores [R]. Rotated anchors [A, 5] give rotated boxes.
    """
    scores, deltas, im_info, anchors = _floats(
        scores=scores, bbox_deltas=bbox_deltas, im_info=im_info, anchors=anchors
    )
    check_rank(scores, 4, "scores")
    n, a, h, w = scores.shape
    if anchors.shape not in ((a, 4), (a, 5)):
        raise OpError(
            f"anchors is {describe(anchors)}; it must have {a} boxes of 4 numbers, or of 5 if rotated"
        )
    size = anchors.shape[1]
    check_shape(deltas, (n, size * a, h, w), "bbox_deltas")
    check_shape(im_info, (n, 3), "im_info")
    plus, adjusted = adjust
    stride = np.float32(1) / np.float32(spatial_scale)
    x = np.arange(w, dtype=np.float32) * stride
    y = np.arange(h, dtype=np.float32) * stride
    shifts = np.zeros((a, h, w, size), np.float32)
    shifts[..., 0], shifts[..., 1] = x[None, None, :], y[None, :, None]
    if size == 4:
        shifts[..., 2:] = shifts[..., :2]
    placed = (shifts + anchors[:, None, None, :]).reshape(-1, size)
    boxes = [np.zeros((0, size + 1), np.float32)]
    probabilities = [np.zeros(0, np.float32)]
    for k in range(n):
        flat = scores[k].reshape(-1)
        order = descending(flat, pre_nms_topN if pre_nms_topN > 0 else None)
        moves = deltas[k].reshape(a, size, h * w).transpose(0, 2, 1).reshape(-1, size)[order]
        height, width, scale = im_info[k]
        proposals = adjusted(placed[order], moves, np.ones(4, np.float32), height, width)
        if size == 4:
            sides = proposals[:, 2:] - proposals[:, :2] + plus
            center = proposals[:, :2] + sides / np.float32(2)
        else:
            center = proposals[:, :2]
            sides = proposals[:, 2:4]
        large = (
            (sides >= np.float32(min_size * scale)).all(1)
            & (center[:, 0] < width)
            & (center[:, 1] < height)
        )
        kept = _without_overlaps(
            proposals, np.flatnonzero(large), nms_thresh, post_nms_topN or -1, plus
        )
        boxes.append(np.concatenate([np.full((len(kept), 1), k, np.float32), proposals[kept]], 1))
        probabilities.append(flat[order][kept])
    return np.concatenate(boxes), np.concatenate(probabilities)


for _type in ("GenerateProposals", "GenerateProposalsCPP"):
    op(_type, outputs=2, gradient="forbidden", dynamic=True)(_generate_proposals)


@op("BBoxTransform", outputs=(1, 2), gradient="forbidden", dynamic=True)
@takes(adjust=_adjust)
def bbox_transform(
    rois,
    deltas,
    im_info,
    *,
    adjust,
    weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
    apply_scale: bool = True,
    rotated: bool = False,
):
    """Boxes [R, 4], or [R, 5] with the image number first, moved by the deltas [R, 4 K] of each class: [R, 4 K].

    The second output counts the boxes of each image. `weights` divide the deltas.
    """
    rois, deltas, im_info = _floats(rois=rois, deltas=deltas, im_info=im_info)
    size = 5 if rotated else 4
    check_rank(deltas, 2, "deltas")
    if (
        rois.ndim != 2
        or rois.shape[1] not in (size, size + 1)
        or deltas.shape[0] != rois.shape[0]
        or deltas.shape[1] % size
    ):
        raise OpError(
            f"rois is {describe(rois)}, deltas {describe(deltas)}; they must have {size} numbers per box"
        )
    check_shape(im_info, (im_info.shape[0], 3), "im_info")
    raise_if(len(weights) != 4, f"weights {list(weights)} must be 4 numbers")
    image = rois[:, 0].astype(int) if rois.shape[1] > size else np.zeros(len(rois), int)
    if (image < 0).any() or (image >= len(im_info)).any() or (np.diff(image) < 0).any():
        raise OpError(f"rois must name the {len(im_info)} images of im_info in ascending order")
    _, adjusted = adjust
    moved = np.zeros(deltas.shape, np.float32)
    for k, (height, width, scale) in enumerate(im_info):
        rows = image == k
        boxes = rois[rows, rois.shape[1] - size :].copy()
        boxes[:, :4] /= scale
        height = int(height / scale + 0.5)
        width = int(width / scale + 0.5)
        for c in range(0, deltas.shape[1], size):
            moved_boxes = adjusted(
                boxes, deltas[rows, c : c + size], np.asarray(weights, np.float32), height, width
            )
            if apply_scale:
                moved_boxes[:, :4] *= scale
            moved[rows, c : c + size] = moved_boxes
    return moved, np.bincount(image, minlength=len(im_info)).astype(np.float32)


_SOFT_METHODS = {
    "linear": False,
    "gaussian": True,
}  # method of soft suppression -> whether it is gaussian


@op("BoxWithNMSLimit", outputs=(3, 6), gradient="forbidden", dynamic=True)
def box_with_nms_limit(
    scores,
    boxes,
    batch_splits=None,
    *,
    score_thresh: float = 0.05,
    nms: float = 0.3,
    detections_per_im: int = 100,
    soft_nms_enabled: bool = False,
    soft_nms_method: str = "linear",
    soft_nms_sigma: float = 0.5,
    soft_nms_min_score_thres: float = 0.001,
    rotated: bool = False,
    cls_agnostic_bbox_reg: bool = False,
    input_boxes_include_bg_cls: bool = True,
    output_classes_include_bg_cls: bool = True,
    legacy_plus_one: bool = True,
):
    """Keeps the best boxes of each image: scores [R, K] of classes, of which the first is background, boxes [R, 4 K].

    Returns the scores, boxes and classes that are kept, their number per image, their rows, and their number per class.
    """
    scores, boxes = _floats(scores=scores, boxes=boxes)
    scores, boxes = (
        v.reshape(v.shape[:2]) if v.ndim == 4 and v.shape[2:] == (1, 1) else v
        for v in (scores, boxes)
    )
    check_rank(scores, 2, "scores")
    classes = scores.shape[1]
    size = 5 if rotated else 4
    blocks = 1 if cls_agnostic_bbox_reg else classes - (not input_boxes_include_bg_cls)
    check_shape(boxes, (scores.shape[0], blocks * size), "boxes")
    unknown = soft_nms_enabled and soft_nms_method not in _SOFT_METHODS
    raise_if(
        unknown, f"soft_nms_method {soft_nms_method!r} must be one of {', '.join(_SOFT_METHODS)}"
    )
    plus = np.float32(legacy_plus_one)
    columns: list[list[np.ndarray]] = [[] for _ in range(6)]
    for rows in _rows_of_images(batch_splits, len(scores)):
        s = scores[rows].copy()
        b = boxes[rows]
        if not input_boxes_include_bg_cls:
            s = np.roll(
                s, 1, axis=1
            )  # compat: then scores begin with class 1, too; the last column is not read
        kept: list[np.ndarray] = [np.zeros(0, np.int64)]
        of_class = [b[:, :0]]
        for j in range(1, classes):
            block = 0 if cls_agnostic_bbox_reg else j - (not input_boxes_include_bg_cls)
            of_class.append(b[:, block * size : (block + 1) * size])
            above = np.flatnonzero(s[:, j] > np.float32(score_thresh))
            if soft_nms_enabled:
                limits = (nms, soft_nms_sigma, soft_nms_min_score_thres)
                kept.append(
                    _softly(
                        of_class[j], s[:, j], above, _SOFT_METHODS[soft_nms_method], limits, plus
                    )
                )
            else:
                above = above[descending(s[above, j])]
                kept.append(
                    _without_overlaps(of_class[j], above, nms, detections_per_im or -1, plus)
                )
        if 0 < detections_per_im < sum(map(len, kept)):
            kept = _best(kept, s, detections_per_im)
        for j in range(1, classes):
            columns[0].append(s[kept[j], j])
            columns[1].append(of_class[j][kept[j]])
            columns[2].append(
                np.full(len(kept[j]), j - (not output_classes_include_bg_cls), np.float32)
            )
            columns[4].append(kept[j].astype(np.int32))
        columns[3].append(np.array([sum(map(len, kept))], np.float32))
        columns[5].append(np.array([[len(r) for r in kept]], np.int32))
    empty = (
        np.zeros(0, np.float32),
        np.zeros((0, size), np.float32),
        *[np.zeros(0, np.float32)] * 2,
    )
    empty += (np.zeros(0, np.int32), np.zeros((0, classes), np.int32))
    return tuple(np.concatenate([e, *parts]) for e, parts in zip(empty, columns))


def _rows_of_images(batch_splits: Any, count: int) -> list[np.ndarray]:
    """The rows of each image, of `count` in all."""
    splits = np.array([count]) if batch_splits is None else np.asarray(batch_splits).astype(int)
    if splits.ndim != 1 or (splits < 0).any() or splits.sum() != count:
        raise OpError(
            f"batch_splits {splits.tolist()[:8]} must add up to the {count} rows of scores"
        )
    return np.split(np.arange(count), np.cumsum(splits)[:-1])


def _best(kept: list[np.ndarray], scores: np.ndarray, most: int) -> list[np.ndarray]:
    """Of the rows that are kept of each class, the `most` with the best scores of all."""
    pairs = np.array([(j, row) for j, rows in enumerate(kept) for row in rows])
    best = pairs[descending(scores[pairs[:, 1], pairs[:, 0]])[:most]]
    return [best[best[:, 0] == j, 1] for j in range(len(kept))]


def _softly(
    boxes: np.ndarray,
    scores: np.ndarray,
    left: np.ndarray,
    gaussian: bool,
    limits: tuple,
    plus: np.float32,
) -> Any:
    """Soft non-maximum suppression: a box lowers, in place, the scores of those with lower scores that overlap it."""
    most_shared, sigma, least = map(np.float32, limits)
    kept: list[int] = []
    while left.size:
        place = int(np.argmax(scores[left]))
        best = left[place]
        kept.append(best)
        left = left.copy()
        left[place] = left[0]
        left = left[1:]
        shared = _overlaps(boxes, best, left, plus)
        factor = (
            np.exp(-shared * shared / sigma)
            if gaussian
            else np.where(shared > most_shared, 1 - shared, 1)
        )
        scores[left] *= factor.astype(np.float32)
        left = left[scores[left] >= least]
    return np.array(kept, np.int64)
