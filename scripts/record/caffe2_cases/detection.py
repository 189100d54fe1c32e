"""Boxes of detection networks: jrnn/nets/ops/contrib/detection.py."""

import numpy as np

from caffe2_cases import case, f32, normal, positive

ANCHORS = np.array([[-16, -16, 31, 31], [-8, -20, 23, 35], [-20, -8, 35, 23]], np.float32)


def proposals(images=1, h=4, w=5, type="GenerateProposals", deltas=0.5, values=None, **args):
    info = f32(*[v for k in range(images) for v in (64 + 8 * k, 80, 1 + k)]).reshape(images, 3)
    scores = (
        np.random.RandomState(h * w)
        .permutation(images * 3 * h * w)
        .reshape(images, 3, h, w)
        .astype(np.float32)
    )
    if values:  # of which many are equal
        scores = scores % values
    blobs = {
        "scores": scores,
        "deltas": deltas * normal(images, 12, h, w),
        "im_info": info,
        "anchors": ANCHORS,
    }
    return case(type, blobs, ["rois", "probabilities"], **args)


def boxes(rows, classes=1, seed=0):
    corner = 40 * positive(rows, classes, 2, seed=seed)
    return np.concatenate(
        [corner, corner + 30 * positive(rows, classes, 2, seed=seed + 1)], 2
    ).reshape(rows, -1)


def with_image(rows, first):
    image = np.repeat(np.arange(2, dtype=np.float32), [first, rows - first])[:, None]
    return np.concatenate([image, boxes(rows)], 1)


def rotated(rows, first=None):
    rows_of_boxes = np.concatenate(
        [60 * positive(rows, 2), 20 * positive(rows, 2), 80 * normal(rows, 1)], 1
    )
    rows_of_boxes[0, 4] = 0.5
    return rows_of_boxes


def limited(rows=14, classes=4, splits=None, block=None, values=None, **args):
    scores = np.random.RandomState(rows).permutation(rows * classes).astype(np.float32) / (
        rows * classes
    )
    scores = scores.reshape(rows, classes)
    if values:
        scores = np.ceil(scores * values).astype(np.float32) / values
    blobs = {"scores": scores, "boxes": boxes(rows, block or classes)}
    if splits:
        blobs["splits"] = f32(*splits)
    return case(
        "BoxWithNMSLimit",
        blobs,
        ["s", "b", "c", "n", "kept", "sizes"][: args.pop("count", 6)],
        **args,
    )


INFO = f32(90, 120, 1.5, 100, 80, 2).reshape(2, 3)
CASES = [
    proposals(min_size=0.0),
    proposals(2, pre_nms_topN=30, post_nms_topN=6, nms_thresh=0.5, min_size=10.0),
    proposals(
        2,
        3,
        4,
        "GenerateProposalsCPP",
        spatial_scale=0.125,
        nms_thresh=0.9,
        deltas=1.5,
        post_nms_topN=0,
    ),
    proposals(1, 3, 3, legacy_plus_one=0, min_size=4.0),
    proposals(1, 2, 2, min_size=500.0),
    proposals(1, 7, 9, values=2, min_size=0.0),
    proposals(1, 7, 9, values=7, min_size=0.0, pre_nms_topN=50),
    proposals(1, 7, 9, values=1, min_size=0.0, pre_nms_topN=33, post_nms_topN=9),
    case(
        "BBoxTransform",
        {"rois": with_image(5, 2), "deltas": normal(5, 8), "im_info": INFO},
        ["out", "n"],
    ),
    case(
        "BBoxTransform",
        {"rois": with_image(5, 5), "deltas": normal(5, 4), "im_info": INFO},
        ["out", "n"],
        apply_scale=0,
    ),
    case(
        "BBoxTransform",
        {"rois": boxes(3), "deltas": 4 * normal(3, 8), "im_info": INFO[:1]},
        ["out"],
        weights=[10.0, 10.0, 5.0, 5.0],
        legacy_plus_one=0,
    ),
    case(
        "BBoxTransform",
        {"rois": rotated(4), "deltas": normal(4, 10), "im_info": INFO[:1]},
        ["out"],
        rotated=1,
    ),
    case(
        "BBoxTransform",
        {"rois": rotated(4), "deltas": normal(4, 5), "im_info": INFO[:1]},
        ["out"],
        rotated=1,
        angle_bound_on=0,
        clip_angle_thresh=90.0,
    ),
    limited(),
    limited(nms=0.1, score_thresh=0.3, detections_per_im=5),
    limited(splits=(5, 0, 9), detections_per_im=4, legacy_plus_one=0),
    limited(block=1, cls_agnostic_bbox_reg=1, count=3),
    limited(block=3, input_boxes_include_bg_cls=0, output_classes_include_bg_cls=0),
    limited(soft_nms_enabled=1, soft_nms_sigma=0.5, soft_nms_min_score_thres=0.2),
    limited(soft_nms_enabled=1, soft_nms_method="gaussian", detections_per_im=8),
    limited(soft_nms_enabled=1, nms=0.1, detections_per_im=-1),
    limited(score_thresh=2.0),
    limited(60, 5, values=3, detections_per_im=30),
    limited(40, 2, values=1, nms=0.6),
]
