"""The operators. Importing this package fills the registry; each module holds one family.

In: arrays and Arguments of an operator. Out: arrays; each module adds its operators to the table. Read `elementwise.py`
first.
"""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    if not _module.name.endswith(".catalog"):  # which is run as a program
        importlib.import_module(_module.name)
