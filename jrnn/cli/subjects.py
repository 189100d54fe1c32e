"""The subject of `jrnn check` that a configuration names."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jrnn.testing.gradients import Subject, subject_of_function, subject_of_net
from jrnn.train.config import Config
from jrnn.train.models.net import NetModel


def subject_of_config(config: Config) -> Subject:
    """Returns the loss of the first batch with the first parameters; a model that is not a net is a JAX function.

    Call it with 64-bit types enabled.

    Raises:
        DataError: if the data cannot be used. ConversionError: for a function that cannot be converted to a net.
    """
    with jax.enable_x64(False):
        task = config.kind.load(config)
        params = jax.device_get(jax.jit(task.model.init)(jax.random.key(config.seed)))
        batch = task.train.at(0)
        carry = jax.device_get(task.model.initial_carry(config.data.batch))
    model = task.model
    if isinstance(model, NetModel):
        fed = {blob: np.asarray(getattr(batch, member)) for blob, member in model.feeds.items()}
        blobs = {**model.constants, **params, **carry, **fed}
        key = jax.random.key(config.seed)
        return subject_of_net(model.net, blobs, model.loss_blob, wrt=[*params, *carry], key=key)

    def model_loss(params: Any) -> Any:
        return model.loss(params, carry, batch, None)[0]

    return subject_of_function(model_loss, (params,))
