"""`online_gradient`: real-time recurrent learning, gradients that do not wait for the end of a sequence.

The derivative S of the carry with respect to the parameters is carried forward: `S[t] = J[t] S[t-1] + B[t]`, where J is the
Jacobian of the step with respect to the carry, and B with respect to the parameters. The gradient of the loss of a step is
known after that step. Memory does not depend on the number of steps.

S has a column for each element of a parameter. Where the carry and a parameter are aligned along an axis, as h and the
columns of W in `x @ W`, an element of the carry depends on its own column alone, and S has one column for all of them.

Source: Williams and Zipser, "A learning algorithm for continually running fully recurrent neural networks", 1989.

Shapes: A the batch axes of the Jacobian, M the size of its blocks (`affine/blocks.py`), C the columns of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.errors import ScanError, near
from jrnn.jaxprs.axes import is_followed
from jrnn.jaxprs.jax_internals import source_line
from jrnn.loops.affine.blocks import AlignedAxes, Blocks, block_of, reads_of, why_no_jacobian
from jrnn.loops.ir import Tree, promoted

MAX_BLOCK = 16  # the largest blocks of a Jacobian that counts as block-diagonal

# `(params, carry, x) -> (carry, loss)`
OnlineStep = Callable[[Tree, Tree, Tree], tuple[Tree, Array]]
# A linear function of carries, or of a parameter: a step's derivative.
Push = Callable[..., Sequence[Array]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OnlineState:
    """The carry, and its derivatives: for each parameter, [A, M, C]."""

    carry: Tree
    derivatives: list[Array]


def online_gradient(step: OnlineStep, *, approximate: str | None = None) -> OnlineGradient:
    """Makes a learner for streams: after each step it has the gradient of that step's loss through all earlier steps.

    This is real-time recurrent learning. It is exact where an element of the new carry reads few elements of the old one:
    diagonal recurrent weights, as in an LSTM or GRU with elementwise recurrence, minGRU and LRU with real carries, or small
    blocks. The sum of the gradients over a sequence, with constant parameters, is the gradient of the summed loss of a scan.

    Args:
        step: `(params, carry, x) -> (carry, loss)`, with a scalar loss; x is anything that one step needs, such as the input
            and the target.
        approximate: None, or "diagonal": of a dense Jacobian only the diagonal is used, so that the gradient is not exact.

    Returns:
        A learner. `learner.init(params, carry, x)` returns the state before the first step. `learner(params, state, x)`
        returns `(loss, gradient, state)`. Both can be jitted, and the state is a pytree, so a learner runs inside a scan.

    Raises:
        ScanError: if `approximate` is unknown; and from the learner, if the Jacobian is dense and `approximate` is None, or
            if the step has no Jacobian or no scalar loss.

    >>> import jax.numpy as jnp
    >>> def step(w, h, x):
    ...     h = jnp.tanh(w * h + x)
    ...     return h, jnp.sum(h**2)
    >>> learner = online_gradient(step)
    >>> w, stream = jnp.full(3, 0.5), jnp.ones((4, 3))
    >>> state = learner.init(w, jnp.zeros(3), stream[0])
    >>> for x in stream:
    ...     loss, gradient, state = learner(w, state, x)
    >>> print(gradient.shape, round(float(loss), 4))
    (3,) 2.4035
    """
    if approximate not in (None, "diagonal"):
        raise ScanError(
            f"online_gradient: approximate must be None or 'diagonal', but is {approximate!r}"
            f"{near(str(approximate), ['diagonal'])}"
        )
    return OnlineGradient(step, approximate)


@dataclass(frozen=True)
class OnlineGradient:
    """A learner for streams, see `online_gradient`.

    Attributes:
        step: `(params, carry, x) -> (carry, loss)`.
        approximate: None or "diagonal".
    """

    step: OnlineStep
    approximate: str | None = None

    def init(self, params: Tree, carry: Tree, x: Tree) -> OnlineState:
        """Returns the state before the first step.

        Args:
            params: the parameters, a pytree of floating-point arrays.
            carry: the initial carry, which does not depend on the parameters.
            x: what one step needs; only its shapes and dtypes are read.
        """
        last, loss = jax.eval_shape(self.step, params, carry, x)
        if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ScanError(
                f"online_gradient: the step must return (carry, loss) with a scalar loss, but returns {loss}"
            )
        carry = promoted(carry, last)
        layout = _GroupLayout.of(self, params, carry, x)
        wide = jaxprs.promoted_type(jnp.float32, *jax.tree.leaves(carry))
        shapes = [(*layout.group.batch, layout.group.block, count) for count in layout.counts]
        return OnlineState(carry, [jnp.zeros(shape, wide) for shape in shapes])

    def __call__(
        self, params: Tree, state: OnlineState, x: Tree
    ) -> tuple[Array, Tree, OnlineState]:
        """Runs one step: `(loss, gradient, state)`.

        Args:
            params: the parameters. If they change from step to step, the gradient is an online learner's,
                not the gradient of a sequence.
            state: the state.
            x: what the step needs.

        Returns:
            The loss of the step; its gradient with respect to the parameters through this and all earlier steps, a pytree
            like `params`; and the next state.
        """
        layout = _GroupLayout.of(self, params, state.carry, x)
        carry, of_carry = jax.tree.flatten(state.carry)
        leaves, of_params = jax.tree.flatten(params)

        def run(carry, leaves):
            params = jax.tree.unflatten(of_params, leaves)
            return self.step(params, jax.tree.unflatten(of_carry, carry), x)

        def new_carry(carry, leaves):
            new, _ = run(carry, leaves)
            return [v.astype(c.dtype) for v, c in zip(jax.tree.leaves(new), carry)]

        def loss_of(carry, leaves):
            _, loss = run(carry, leaves)
            return loss

        # This step's loss, with respect to the carry before it and to the parameters in it.
        loss_and_gradient = jax.value_and_grad(loss_of, argnums=(0, 1))
        loss, (to_carry, to_params) = loss_and_gradient(carry, leaves)
        new, push = jax.linearize(new_carry, carry, leaves)
        zero_carry = list(map(jnp.zeros_like, carry))
        zero_params = list(map(jnp.zeros_like, leaves))

        def push_carry(tangents):
            return push(tangents, zero_params)

        jacobian = layout.jacobian(push_carry, carry)
        gradients = []
        derivatives = []
        for j, s in enumerate(state.derivatives):
            gradient = to_params[j] + layout.pulled(j, to_carry, s)
            gradients.append(gradient.astype(leaves[j].dtype))

            def push_parameter(tangent, j=j):
                return push(zero_carry, jaxprs.replaced(zero_params, [j], [tangent]))

            through_carry = jnp.einsum("...ij,...jc->...ic", jacobian, s, precision="highest")
            derivatives.append(through_carry + layout.columns(j, push_parameter))
        next_state = OnlineState(jax.tree.unflatten(of_carry, new), derivatives)
        return loss, jax.tree.unflatten(of_params, gradients), next_state


@dataclass(frozen=True)
class _GroupLayout:
    """How derivatives are laid out.

    Attributes:
        group: all carries as vectors [A, M].
        dense: the same with the batch axes of the exact Jacobian, where only the diagonal is used; or None.
        params: the types of the parameters.
        own: for each parameter, its axes that are aligned with a batch axis of the group, and that axis.
        counts: C for each parameter; 0 if the carry does not read it.
    """

    group: Blocks
    dense: Blocks | None
    params: tuple[jax.ShapeDtypeStruct, ...]
    own: tuple[dict[int, int], ...]
    counts: tuple[int, ...]

    @staticmethod
    def of(learner: OnlineGradient, params: Tree, carry: Tree, x: Tree) -> _GroupLayout:
        leaves = jax.tree.leaves(carry)
        n_params = len(jax.tree.leaves(params))
        closed = jax.make_jaxpr(lambda p, c, x: learner.step(p, c, x)[0])(params, carry, x)
        why = why_no_jacobian(closed, leaves)
        dtypes = map(jnp.result_type, jax.tree.leaves(params))
        if why is None and not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
            why = "a parameter is not a floating-point array; close over it, or put it into x"
        if why is not None:
            raise ScanError(f"online_gradient: this step has no exact gradient here ({why})")
        program = jaxprs.inlined(closed, jaxprs.LOWERED_CALLS)
        old = program.invars[n_params : n_params + len(leaves)]
        shapes = [tuple(v.aval.shape) for v in old]
        group = block_of(tuple(range(len(old))), shapes, reads_of(program, old))
        dense = None
        if group.block > max(MAX_BLOCK, len(leaves)):
            if learner.approximate is None:
                eqn = _not_followed(program, old)
                if eqn is not None:
                    raise ScanError(
                        f"online_gradient: through {eqn.primitive.name} at {source_line(eqn)} it is not known which "
                        "elements of the carry an element reads, so it counts as reading all of them; use operations that "
                        "are elementwise, such as jnp.where in place of jax.lax.cond, or give approximate='diagonal'"
                    )
                raise ScanError(
                    f"online_gradient: an element of the carry reads {group.block} elements of the carry before, so exact "
                    f"derivatives would need {group.block} x {group.block} blocks (at most {MAX_BLOCK} are exact); use "
                    "recurrent weights that are diagonal or in small blocks, or give approximate='diagonal'"
                )
            if len(set(group.shapes)) > 1:
                raise ScanError(
                    "online_gradient: approximate='diagonal' needs carries of one shape; pad or reshape them"
                )
            dense = group
            group = Blocks(group.carries, group.shapes, tuple(range(len(group.shapes[0]))))

        # How each parameter's derivative is laid out.
        reads = reads_of(program, program.invars[:n_params])
        types = tuple(v.aval for v in program.invars[:n_params])
        own = []
        counts = []
        for j, aval in enumerate(types):
            axes_read = [axes[j] for axes in reads if j in axes]
            own_axes = _own(aval.shape, axes_read, group)
            own.append(own_axes)
            sizes = [n for k, n in enumerate(aval.shape) if k not in own_axes]
            counts.append(math.prod(sizes) if axes_read else 0)
        return _GroupLayout(group, dense, types, tuple(own), tuple(counts))

    def columns(self, j: int, push: Push) -> Array:
        """Returns the derivatives of a step with respect to a parameter, [A, M, C]. `push` takes a tangent of it."""
        count = self.counts[j]
        aval = self.params[j]
        if not count:
            return jnp.zeros((*self.group.batch, self.group.block, 0), jnp.float32)
        shape = [1 if k in self.own[j] else n for k, n in enumerate(aval.shape)]
        units = jnp.eye(count, dtype=aval.dtype).reshape(count, *shape)
        derivatives = jax.vmap(push)(jnp.broadcast_to(units, (count, *aval.shape)))
        return jnp.moveaxis(self.group.join(derivatives, 1), 0, -1)

    def pulled(self, j: int, to_carry: Sequence[Array], s: Array) -> Array:
        """Returns the gradient with respect to a parameter from that with respect to the carry."""
        aval = self.params[j]
        own = self.own[j]
        if not self.counts[j]:
            return jnp.zeros(aval.shape, aval.dtype)
        gradient = jnp.sum(self.group.join(to_carry)[..., None] * s, axis=-2)  # [A, C]

        # Sum over batch axes that the parameter has not: its own remain.
        remaining_axes = [axis for axis in self.group.aligned if axis in own.values()]
        summed = [k for k, axis in enumerate(self.group.aligned) if axis not in remaining_axes]
        gradient = jnp.sum(gradient, axis=tuple(summed))

        # From [own axes, C] to the parameter's order.
        order = {k: remaining_axes.index(axis) for k, axis in own.items()}
        shape = list(gradient.shape[:-1])
        for k, size in enumerate(aval.shape):
            if k not in own:
                order[k] = len(shape)
                shape.append(size)
        axes = [order[k] for k in range(len(aval.shape))]
        return jnp.transpose(gradient.reshape(shape), axes)

    def jacobian(self, push: Push, carry: Sequence[Array]) -> Array:
        """Returns the blocks [A, M, M] of the Jacobian, or the diagonals of the dense blocks."""
        if self.dense is None:
            return self.group.jacobian(push, carry)
        source = self.dense
        count = len(carry)
        each = source.sizes[0]

        def same_element(k):
            """The derivatives of element e of every carry with respect to element e of one, [A, K]."""
            column = source.join(push(source.basis(k, carry))).reshape(*source.batch, count, each)
            return jax.lax.dynamic_index_in_dim(column, k % each, -1, keepdims=False)

        diagonals = jax.lax.map(same_element, jnp.arange(source.block))  # [K E, A, K]
        one = Blocks((0,), source.shapes[:1], source.aligned)
        diagonals = diagonals.reshape(count, each, *diagonals.shape[1:])
        diagonals = jnp.moveaxis(diagonals, 1, -1)  # [K, A, K, E]
        diagonals = jnp.moveaxis(diagonals, -2, 1)  # [from, to, A, E]

        def in_shape(vectors):
            (leaf,) = one.part(vectors)
            return leaf

        diagonals = jax.vmap(jax.vmap(in_shape))(diagonals)  # [from, to, shape of the carry]
        return jnp.moveaxis(diagonals, (1, 0), (-2, -1))


def _not_followed(program: jaxprs.Program, old: Sequence[jaxprs.Var]) -> jaxprs.Eqn | None:
    """Returns the first equation of the carry through which elements are not followed, such as a branch; or None."""
    on_carry = jaxprs.depends(program.eqns, old)
    for eqn in program.eqns:
        reads_carry = any(jaxprs.is_in(a, on_carry) for a in eqn.invars)
        if reads_carry and not is_followed(eqn):
            return eqn
    return None


def _own(shape: Sequence[int], reads: Sequence[AlignedAxes], group: Blocks) -> dict[int, int]:
    """Returns the axes of a parameter that are aligned with a batch axis of the group, the same one for every carry."""
    aligned = {}
    for k in range(len(shape)):
        axes_read = {axes[k] for axes in reads}
        if len(axes_read) != 1:
            continue
        (axis,) = axes_read
        if axis is not None and axis in group.aligned and group.shapes[0][axis] == shape[k]:
            aligned[k] = axis
    return aligned if len(set(aligned.values())) == len(aligned) else {}
