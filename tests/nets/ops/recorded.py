"""The recorded cases: nets of one operator and its gradient operators, with what Caffe2 answered.

scripts/record/caffe2_operators.py records them.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import lzma
import pathlib

import numpy as np

import jrnn
from jrnn.nets import registry

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "ops"


@dataclasses.dataclass(frozen=True)
class Case:
    """A recorded case: a net of one operator and its gradient operators, what it read and what Caffe2 wrote."""

    name: str
    net: jrnn.Net
    inputs: dict
    outputs: dict
    gradient: dict | None

    @property
    def op(self):
        return self.net.ops[0]

    @property
    def forward(self):
        """The operator alone, before its gradients were asked for."""
        seeds = self.gradient["seeds"].values() if self.gradient else ()
        declared = tuple(n for n in self.net.external_inputs if n not in seeds)
        return dataclasses.replace(
            self.net, ops=self.net.ops[:1], external_inputs=declared, external_outputs=()
        )

    @property
    def random(self):
        return any(registry.lookup(op.type).random for op in self.net.ops)

    @property
    def dynamic(self):
        return any(registry.lookup(op.type).dynamic for op in self.net.ops)

    @property
    def has_strings(self):
        return any(v.dtype.kind == "S" for v in (*self.inputs.values(), *self.outputs.values()))


@functools.cache
def read_cases():
    """All recorded cases, which several files of tests read."""
    return tuple(_cases())


def _cases():
    for path in sorted(GOLDEN.glob("*.npz.xz")):
        with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as z:
            cases: dict[int, dict] = {}
            for key in z.files:
                number, kind, *name = key.split("|", 2)
                case = cases.setdefault(int(number), {"in": {}, "out": {}})
                if name:
                    case[kind][name[0]] = z[key]
                else:
                    case[kind] = z[key]
        for k, c in sorted(cases.items()):
            net = jrnn.read_net(c["net"].tobytes())
            name = f"{path.name.split('.')[0]}-{k}-{net.ops[0].type}"
            yield Case(
                name,
                net,
                c["in"],
                c["out"],
                json.loads(str(c["gradient"])) if "gradient" in c else None,
            )
