"""The one thing that pyproject.toml cannot say: `configs/` of the repository is `jrnn/configs` of the package."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["jrnn*"]), "jrnn.configs"], package_dir={"jrnn.configs": "configs"})
