"""The operators. Importing this package fills the registry; each module holds one family."""

from . import (
    elementwise,
    recurrent_network,
    recurrent_network_gradient,
)
