"""The build backend: setuptools', which gets jaxlib's headers where there is a compiler for the kernel for CPUs."""

import os
import shutil

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

# Of the oldest version that jrnn supports: newer ones run what was built with them.
HEADERS = ["jaxlib>=0.10,<0.11"]


def _headers() -> list[str]:
    """Returns what building the kernel needs; nothing if there is no compiler, or JRNN_BUILD_KERNEL=0 is set."""
    compilers = *os.environ.get("CXX", "").split()[:1], "c++", "g++", "clang++"
    wanted = os.environ.get("JRNN_BUILD_KERNEL") != "0" and any(map(shutil.which, compilers))
    return HEADERS if wanted else []


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_headers()]


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_headers()]
