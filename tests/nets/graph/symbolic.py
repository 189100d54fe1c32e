"""Random nets of a toy operator set, and an interpreter in which a value is a hash of how it was computed.

Two nets give equal values only where they do the same, whatever the operators mean. Operators with sub-nets find their
blobs through their arguments as the real ones do, so that a pass which forgets an argument or a sub-net is found out.
"""

import random
import zlib
from collections import ChainMap

from jrnn.nets.ir import Net, Op

IDENTITIES = ("Copy", "CopyCPUToGPU", "CopyGPUToCPU", "Reshape")


def run(net, blobs):
    """The workspace after `net` ran on `blobs`."""
    env = dict(blobs)
    execute(net, env)
    return env


def outputs(net, blobs):
    env = run(net, blobs)
    return [env[name] for name in net.external_outputs]


def execute(net, env):
    for op in net.ops:
        RULES.get(op.type, elementwise)(op, env)


def elementwise(op, env):
    values = [env[name] for name in op.inputs]
    for k, name in enumerate(op.outputs):
        same = k == 0 and op.type in IDENTITIES
        env[name] = values[0] if same else hash((zlib.crc32(op.type.encode()), k, *values))


def branch(op, env):
    """If: the branches share the workspace; what they write beyond the declared outputs is theirs alone."""
    inner = dict(env)
    execute(op.arg("then_net") if env[op.inputs[0]] % 2 else op.arg("else_net"), inner)
    env.update((name, inner[name]) for name in op.outputs if name in inner)


def closed(op, env):
    """Do: a workspace in which only the bound names exist."""
    outer = [*op.inputs[:-1], *op.outputs[:-1]]
    bound = dict(
        zip(
            (b.decode() for b in op.arg("inner_blobs")),
            (outer[i] for i in op.arg("outer_blobs_idx")),
        )
    )
    inner = {name: env[there] for name, there in bound.items() if there in env}
    execute(op.arg("net"), inner)
    env.update(
        (there, inner[name])
        for name, there in bound.items()
        if there in op.outputs and name in inner
    )
    env[op.outputs[-1]] = hash(("workspace", tuple(sorted(inner.values()))))


def recurrent(op, env):
    """RecurrentNetwork: three steps whose input and output are found by the names in the links and aliases."""
    h_in, h_out, x_t = (b.decode() for b in op.arg("link_internal"))
    states, _, x = (b.decode() for b in op.arg("link_external"))
    assert x == op.inputs[0] and op.arg("alias_src") == (states.encode(),)
    state = env[op.inputs[1]]
    for t in range(3):
        step = {h_in: state, x_t: hash((env[x], t)), "timestep": t}
        execute(op.arg("step_net"), ChainMap(step, env))
        state = step[h_out]
    (result,) = (b.decode() for b in op.arg("alias_dst"))
    env[result] = state


RULES = {"If": branch, "Do": closed, "RecurrentNetwork": recurrent}


def random_net(seed, size=200, nested=True):
    """A net of `size` operators on few names, so that blobs are overwritten, with sub-nets where `nested`.

    It reads x0, x1 and w, and inside step nets also g, which it does not declare.
    """
    draw = random.Random(seed)
    names = [f"b{i}" for i in range(draw.choice([6, 12, 40]))]
    known = ["x0", "x1", "w"]
    ops = []

    def target():
        return draw.choice(names)

    def simple(readable, writable):
        reads = draw.choices(readable, k=draw.choice([1, 1, 2]))
        kind = (
            draw.choice(["Relu", "Tanh", "Copy"])
            if len(reads) == 1
            else draw.choice(["Add", "Mul"])
        )
        if draw.random() < 0.3 and reads[0] not in ("x0", "x1", "w"):
            return Op.of(kind, reads, [reads[0]])
        return Op.of(kind, reads, [draw.choice(writable)])

    def nested_op(i):
        match draw.choice(["If", "Do", "RecurrentNetwork"]):
            case "If":
                cond, a, b = draw.sample(known, 3)
                out = target()
                nets = []
                for label in ("then", "else"):
                    body = [
                        Op.of("Add", [a, b], [f"local{i}"]),
                        Op.of(label, [f"local{i}", "w"], [out]),
                    ]
                    may_skip = label == "else" and out in known and draw.random() < 0.5
                    nets.append(Net(label, tuple(body[:1] if may_skip else body)))
                return Op.of(
                    "If", dict.fromkeys([cond, a, b]), [out], then_net=nets[0], else_net=nets[1]
                )
            case "Do":
                a = draw.choice(known)
                out = target()
                body = (
                    Op.of("Relu", ["in"], ["t"]),
                    Op.of("Mul", ["t", "in"], ["t"]),
                    Op.of("Tanh", ["t"], ["out"]),
                )
                ws = f"ws{i}"
                ops.append(Op.of("CreateScope", [], [ws]))
                bound = {"inner_blobs": ["in", "out"], "outer_blobs_idx": [0, 1]}
                if out == a:
                    body, bound = (
                        (Op.of("Relu", ["in"], ["in"]),),
                        {"inner_blobs": ["in"], "outer_blobs_idx": [0]},
                    )
                return Op.of("Do", [a, ws], [out, ws], net=Net("body", body), **bound)
            case _:
                x, h0 = draw.sample(known, 2)
                step = Net(
                    "step",
                    (
                        Op.of("Mul", ["x_t", "h"], ["t"]),
                        Op.of("Relu", ["t"], ["t"]),
                        Op.of("Add", ["t", draw.choice(["g", "w", draw.choice(known)])], ["h_new"]),
                    ),
                    ("x_t", "h", "w"),
                    ("h_new",),
                )
                out = draw.choice([n for n in names if n not in (x, h0)])
                return Op.of(
                    "RecurrentNetwork",
                    dict.fromkeys([x, h0, "w"]),
                    [out],
                    step_net=step,
                    link_internal=["h", "h_new", "x_t"],
                    link_external=[f"states{i}", f"states{i}", x],
                    alias_src=[f"states{i}"],
                    alias_dst=[out],
                )

    while len(ops) < size:
        if nested and draw.random() < 0.06:
            op = nested_op(len(ops))
        elif draw.random() < 0.15:
            op = Op.of("Split", [draw.choice(known)], draw.sample(names, 2))
        elif draw.random() < 0.2:
            op = Op.of(
                draw.choice(["CopyCPUToGPU", "CopyGPUToCPU"]), [draw.choice(known[-3:])], [target()]
            )
        else:
            op = simple(known, names)
        ops.append(op)
        for name in op.outputs:
            if name in known:
                known.remove(name)
            if not name.startswith("ws"):
                known.append(name)
    written = [n for n in known if n.startswith("b")]
    return Net(
        f"random{seed}",
        tuple(ops),
        ("x0", "x1", "w"),
        tuple(draw.sample(written, min(3, len(written)))),
    )


def feeds(net):
    """Values for all that a random net reads from outside."""
    return {name: 1000 + k for k, name in enumerate(("x0", "x1", "w", "g"))}
