"""LearningRate with every policy, and the counters of iterations that drive it: Iter, AtomicIter, CreateMutex.

A policy is a function of the iteration that returns the factor on `base_lr`; its keyword-only parameters are Arguments of
LearningRate, with the types of their defaults. In a `composite`, the arguments of policy k are named `sub_policy_k_NAME`.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError, near
from jrnn.nets.ir import Ints, Values
from jrnn.nets.ops.values import check_integers, raise_if, scalar, takes
from jrnn.nets.registry import op


def _number(iteration: Any) -> Any:
    return jnp.asarray(iteration).astype(jnp.float32)


def _positive(name: str, value: Any) -> Any:
    raise_if(value <= 0, f"argument {name!r} must be positive, is {value}")
    return value


def _ramp(i: Any, start: float, num_iter: int) -> Any:
    """A line from `start` at 0 to 1 at `num_iter`."""
    return start + (1 - start) * _number(i) / max(num_iter, 1)


def _alter(i, *, active_first=True, active_period=-1, inactive_period=-1):
    place = i % (
        _positive("active_period", active_period) + _positive("inactive_period", inactive_period)
    )
    return jnp.where(
        (place < active_period) if active_first else (place >= inactive_period), 1.0, 0.0
    )


def _hill(i, *, num_iter=0, start_multiplier=0.0, gamma=0.0, power=0.0, end_multiplier=0.0):
    after = (1 + gamma * jnp.maximum(_number(i - num_iter), 0)) ** -power
    return jnp.where(
        i < num_iter, _ramp(i, start_multiplier, num_iter), jnp.maximum(after, end_multiplier)
    )


def _slope(i, *, num_iter_1=0, multiplier_1=0.0, num_iter_2=0, multiplier_2=0.0):
    raise_if(
        num_iter_1 == num_iter_2,
        f"arguments 'num_iter_1' and 'num_iter_2' must differ, both are {num_iter_1}",
    )
    slope = (multiplier_2 - multiplier_1) / (num_iter_2 - num_iter_1)
    line = multiplier_2 + _number(i - num_iter_2) * slope
    return jnp.where(i < num_iter_1, multiplier_1, jnp.maximum(line, multiplier_2))


def _cyclical(i, *, base_lr, max_lr=0.005, stepsize=0, decay=1.0):
    cycle = i // (2 * _positive("stepsize", stepsize))
    # 1 at both ends of a cycle, 0 in its middle.
    away = jnp.abs(_number(i - 2 * stepsize * cycle) / stepsize - 1)
    return 1 + (max_lr / abs(base_lr) - 1) * (1 - away) * decay ** _number(cycle)


def _cosine(i, *, max_lr=0.5, min_lr=0.1, period=50, t_mult=1.0, lr_shrink=0.99):
    _positive("period", period)
    _positive("t_mult", t_mult)
    if t_mult == 1:
        cycle = _number(i // period)
        part = _number(i % period) / period
    else:
        # t_mult to the power of the (fractional) cycle.
        grown = 1 + _number(i) / period * (t_mult - 1)

        def start(k):
            return (t_mult**k - 1) / (t_mult - 1) * period

        cycle = jnp.floor(jnp.log(jnp.maximum(grown, 1e-30)) / math.log(t_mult))
        # rounding may place an iteration at the end of a cycle into its neighbor
        cycle = jnp.where(
            _number(i) >= start(cycle + 1),
            cycle + 1,
            jnp.where(_number(i) < start(cycle), cycle - 1, cycle),
        )
        part = (_number(i) - start(cycle)) / (t_mult**cycle * period)
    return lr_shrink**cycle * (min_lr + 0.5 * (max_lr - min_lr) * (1 + jnp.cos(math.pi * part)))


def _warmup(
    *,
    start_warmup_multiplier=0.1,
    constant_warmup_num_iter=10000000,
    linear_warmup_num_iter=10000000,
) -> Callable[[Any, Callable[[Any], Any]], Any]:
    """A function of the iteration and of the policy that follows, which counts from the end of the warmup."""
    end = constant_warmup_num_iter + linear_warmup_num_iter

    def warmup(i: Any, then: Callable[[Any], Any]) -> Any:
        ramp = _ramp(i - constant_warmup_num_iter, start_warmup_multiplier, linear_warmup_num_iter)
        after = jnp.where(i < end, ramp, then(jnp.maximum(i - end, 0)))
        return jnp.where(i < constant_warmup_num_iter, start_warmup_multiplier, after)

    return warmup


@takes(warmup=_warmup)
def _constant_then_linear(i, *, warmup):
    return warmup(i, lambda j: 1.0)


@takes(warmup=_warmup)
def _composite_cyclical(
    i, *, warmup, base_lr, cyclical_max_lr=0.05, cyclical_step_size=1000000, cyclical_decay=1.0
):
    args = {"max_lr": cyclical_max_lr, "stepsize": cyclical_step_size, "decay": cyclical_decay}
    return warmup(i, lambda j: _cyclical(j, base_lr=base_lr, **args))


@takes(warmup=_warmup)
def _composite_cosine(
    i,
    *,
    warmup,
    cosine_max_lr=0.5,
    cosine_min_lr=0.1,
    cosine_period=50,
    cosine_t_mult=1.0,
    cosine_lr_shrink=0.99,
):
    args = {
        "max_lr": cosine_max_lr,
        "min_lr": cosine_min_lr,
        "period": cosine_period,
        "t_mult": cosine_t_mult,
    }
    return warmup(i, lambda j: _cosine(j, **args, lr_shrink=cosine_lr_shrink))


POLICIES: dict[str, Callable] = {
    "fixed": lambda i: 1.0,
    "step": lambda i, *, gamma=0.0, stepsize=0: (
        gamma ** _number(i // _positive("stepsize", stepsize))
    ),
    "exp": lambda i, *, gamma=0.0: gamma ** _number(i),
    "inv": lambda i, *, gamma=0.0, power=0.0: (1 + gamma * _number(i)) ** -power,
    "poly": lambda i, *, power=0.0, max_iter=-1: (
        (1 - _number(i) / _positive("max_iter", max_iter)) ** power
    ),
    "gate": lambda i, *, num_iter=0, multiplier_1=1.0, multiplier_2=1.0: jnp.where(
        i < num_iter, multiplier_1, multiplier_2
    ),
    "alter": _alter,
    "linearWarmup": lambda i, *, start_multiplier=0.0, num_iter=0: jnp.where(
        i < num_iter, _ramp(i, start_multiplier, num_iter), 1.0
    ),
    "constantWarmup": lambda i, *, multiplier=0.5, num_iter=0: jnp.where(
        i < num_iter, multiplier, 1.0
    ),
    "pieceWarmup": lambda i, *, m1=0.5, n1=0, m2=0.5, n2=0, m3=0.5: jnp.where(
        i < n1, m1, jnp.where(i < n2, m2, m3)
    ),
    "hill": _hill,
    "slope": _slope,
    "cyclical": _cyclical,
    "cosine": _cosine,
    "constantThenLinearWarmup": _constant_then_linear,
    "compositeCyclical": _composite_cyclical,
    "compositeCosine": _composite_cosine,
}


def _parameters(policy: str) -> list[inspect.Parameter]:
    """The Arguments of a policy, with the types of their defaults, and base_lr if it reads that."""
    own = inspect.signature(POLICIES[policy]).parameters.values()
    return [p.replace(annotation=type(p.default)) for p in own if p.kind is p.KEYWORD_ONLY]


def _factor(policy: str, i: Any, base_lr: float, args: Values) -> Any:
    """The factor of one policy, with the `args` that it has."""
    if policy not in POLICIES:
        raise OpError(f"argument 'policy' is {policy!r}{near(policy, [*POLICIES, 'composite'])}")
    own = {p.name: p.annotation for p in _parameters(policy)}
    given = {name: own[name](value) for name, value in args.items() if name in own}
    if "base_lr" in own:
        given["base_lr"] = base_lr
    return POLICIES[policy](i, **given)


def _composite(i: Any, base_lr: float, sub_policy_num_iters: Ints, op: Any) -> Any:
    """Policies in sequence, each for its number of iterations, the last one without end; all count from 0."""
    raise_if(not sub_policy_num_iters, "policy 'composite' needs argument 'sub_policy_num_iters'")
    wire = {a.name: a.value for a in op.args}
    rate: Any = None
    end = sum(sub_policy_num_iters)
    for k in reversed(range(len(sub_policy_num_iters))):
        prefix = f"sub_policy_{k}_"
        args = {name.removeprefix(prefix): v for name, v in wire.items() if name.startswith(prefix)}
        raise_if("policy" not in args, f"policy 'composite' needs argument '{prefix}policy'")
        factor = args.get("lr_scale", 1.0) * _factor(args["policy"].decode(), i, base_lr, args)
        # compat: iteration 1 is the first of the first policy
        rate = factor if rate is None else jnp.where(i <= end, factor, rate)
        end -= sub_policy_num_iters[k]
    return rate


def learning_rate(
    iteration,
    *,
    base_lr: float,
    policy: str,
    sub_policy_num_iters: Ints = (),
    op,
    **args,
):
    """base_lr times the factor of the policy at this iteration, a float32 scalar."""
    check_integers(iteration, "the iteration")
    i = scalar(iteration, "the iteration")
    if policy == "composite":
        factor = _composite(i, base_lr, sub_policy_num_iters, op)
    else:
        factor = _factor(policy, i, base_lr, args)
    return (base_lr * jnp.asarray(factor, jnp.float32)).astype(jnp.float32)


def _signature() -> inspect.Signature:
    """The operator's Arguments: its own, and the Arguments of all policies."""
    own = dict(inspect.signature(learning_rate, eval_str=True).parameters)
    own.pop("args")
    of_policies = {}
    for policy in POLICIES:
        for parameter in _parameters(policy):
            of_policies[parameter.name] = parameter
    of_policies.pop("base_lr", None)
    return inspect.Signature([*own.values(), *of_policies.values()])


learning_rate.__signature__ = _signature()  # type: ignore[attr-defined]
op("LearningRate", gradient="stops")(learning_rate)


@op("Iter", gradient="stops", inplace={0: 0})
def iter_(iteration=None):
    """The iteration plus 1; without an input, the first one."""
    if iteration is None:
        return np.ones(1, np.int64)
    scalar(iteration, "the iteration")
    return iteration + np.ones((), iteration.dtype)


op("AtomicIter", gradient="stops", inplace={0: 1})(lambda mutex, iteration: iter_(iteration))


@op("CreateMutex", gradient="forbidden")
def create_mutex():
    """A placeholder for the lock of Caffe2's AtomicIter; a pure function needs none."""
    return np.zeros((), np.bool_)
