"""The commonest gradient maker: one gradient operator that reads blobs of the forward operator and the gradient."""

from __future__ import annotations

from jrnn.registry import gradient


def differentiate(type: str, reads: str, inputs: int = 1) -> None:
    """Registers the gradient of `type` as one operator `typeGradient`, which keeps the arguments.

    reads: the names of what the gradient operator reads, in order: x0, x1, ... the forward operator's inputs (x is x0), y
    its output, dy the gradient of that. inputs: how many of the forward operator's first inputs get a gradient.
    """

    def blob(g, name: str) -> str:
        if name == "dy":
            return g.grad_output(0)
        return g.output(0) if name == "y" else g.input(int(name[1:] or 0))

    @gradient(type)
    def _(g):
        g.emit(type + "Gradient", [blob(g, n) for n in reads.split()], [g.grad_input(k) for k in range(inputs)])
