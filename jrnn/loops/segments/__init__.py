"""The option `axis_name`: a scan whose time axis is divided among the devices of a mesh axis, inside `jax.shard_map`.

In: a step, and this device's part of the inputs. Out: this device's outputs, and the last carry of all. Read `api.py`
first.

Each device has a segment of the steps. All it needs to run its segment like any other scan is the carry before it, its
*start*. This folder computes the starts, with few bytes sent, in stages. A stage is a set of carries that read only each
other and carries of earlier stages:

- *overwritten*: the new carry does not read the old one, so a last carry depends on inputs only. It is sent on.
- *affine*: `S -> A S + B` over a segment. B is the last carry from a start of zero, and A is what the linear part of the
  step makes of a basis: one array for elementwise steps, and for matrix states whose step is affine in rows
  (`affine/matrix.py`) one matrix for each head. All devices compute A and B at the same time. Then the starts follow from
  products with A: on every device, of all summaries (`all_gather`), or on one device after the other (`ppermute`).
- *opaque*: any other step. One device after the other runs its segment, and hands the carry on.

If A, B or a start is not finite, as products of large factors may be where the carries are not, all carries are handed on.

The equations `start[d+1] = segment[d](start[d])` are differentiated, not the algorithm that solved them: the
segments are linearized once at their starts, and the tangents of the starts follow in the same stages, with the same A.
Its transpose is the reverse pass.

Shapes: D devices, T steps of a segment, K the axis of S that the step contracts, R runs of a basis.
"""

from jrnn.loops.segments.api import scan
from jrnn.loops.segments.shard import TimeShard

__all__ = ["TimeShard", "scan"]
