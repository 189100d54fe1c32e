"""Training from a configuration: `load_config`, `train`, `sample_run`, `export_run`."""

from .config import Config, load_config
from .loop import Result, train
from .sample import sample_run
from .setup import export_run
