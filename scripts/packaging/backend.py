"""The build backend: setuptools', which gets jaxlib's headers where there is a compiler for the kernel for CPUs."""

import os
import shutil

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

HEADERS = ["jaxlib>=0.10,<0.11"]  # of the oldest version that jrnn supports: newer ones run what was built with them


def _headers() -> list[str]:
    compilers = (os.environ.get("CXX", "").split()[:1] or [""])[0], "c++", "g++", "clang++"
    return HEADERS if any(name and shutil.which(name) for name in compilers) else []


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_headers()]


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_headers()]
