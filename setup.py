"""What pyproject.toml cannot say: where `configs/` is in the package, the README that a package index shows, and the kernel.

An index has no files of the repository. Links to them become absolute where pyproject.toml names the repository
(`project.urls.Repository`); else they become plain text, and pictures are left out.

The kernel for CPUs (`jrnn/loops/kernels/native/src`) is a plain shared object. It is compiled once for each set of
instructions. If there is no compiler that can build it, or JRNN_BUILD_KERNEL=0 is set, jrnn is installed without it.
"""

import importlib.util
import os
import platform
import re
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
IS_BUILT = (
    os.environ.get("JRNN_BUILD_KERNEL") != "0" and importlib.util.find_spec("jaxlib") is not None
)
SOURCE = "jrnn/loops/kernels/native/src"
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-Wno-psabi",
    "-g0",
]
AVX2 = ["-mavx2", "-mfma"]
SETS = {  # of x86-64; the flags and the bytes of a vector
    "avx512": (
        [
            *AVX2,
            *(f"-mavx512{part}" for part in ("f", "dq", "bw", "vl")),
            "-mprefer-vector-width=512",
        ],
        64,
    ),
    "avx2": (AVX2, 32),
}


def readme() -> str:
    """The README for a package index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository", "").rstrip("/")

    def absolute(found: re.Match) -> str:
        mark, text, target = found.groups()
        if repository:
            return f"{mark}[{text}]({repository}/{'raw' if mark else 'blob'}/main/{target})"
        return "" if mark else text

    return re.sub(
        r"(!?)\[([^]]*)\]\((?![a-z]+:|#)([^)]+)\)",
        absolute,
        (ROOT / "README.md").read_text(encoding="utf-8"),
    )


class BuildKernel(build_ext):
    """Compiles one file with several sets of flags, and links an object that is no module of Python."""

    def build_extension(self, ext: Extension) -> None:
        if self.compiler.compiler_type == "msvc":
            raise CompileError("the kernel needs GCC's vector extensions, which GCC and clang have")
        (jaxlib,) = importlib.util.find_spec("jaxlib").submodule_search_locations
        headers = ["-isystem", str(Path(jaxlib) / "include")]
        x86 = platform.machine().lower() in ("x86_64", "amd64") and "arm64" not in self.plat_name
        sets = {**(SETS if x86 else {}), "base": ([], 16)}
        objects = []
        for name, (flags, size) in sets.items():
            macros = [("JRNN_KERNEL", name), ("JRNN_VECTOR_BYTES", str(size))]
            folder = f"{self.build_temp}/{name}"
            objects += self.compiler.compile(
                [f"{SOURCE}/kernel.cpp"],
                folder,
                macros,
                extra_postargs=[*FLAGS, *flags],
                depends=ext.depends,
            )
        macros = [("JRNN_X86_LEVELS", "1")] if x86 else []
        flags = [*FLAGS, *headers]
        entry = [f"{SOURCE}/entry.cpp"]
        objects += self.compiler.compile(
            entry, self.build_temp, macros, extra_postargs=flags, depends=ext.depends
        )
        path = self.get_ext_fullpath(ext.name)
        link = [] if sys.platform == "darwin" else ["-static-libstdc++", "-static-libgcc", "-s"]
        self.compiler.link_shared_object(objects, path, extra_postargs=link, target_lang="c++")

    def get_ext_filename(self, name: str) -> str:
        return name.replace(".", "/") + (".dylib" if sys.platform == "darwin" else ".so")


class PlatformWheel(bdist_wheel):
    """A wheel for any Python, because the object does not use Python's interface; for any machine if there is no object."""

    def run(self) -> None:
        self.run_command("build")
        build = self.get_finalized_command("build_ext")
        if not (Path(build.build_lib) / build.get_ext_filename(KERNEL.name)).is_file():
            print(
                "notice: the kernel for CPUs could not be compiled; this wheel is without it",
                file=sys.stderr,
            )
            self.root_is_pure = True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


KERNEL = Extension(
    "jrnn.loops.kernels.native.libjrnn_loops",
    [f"{SOURCE}/kernel.cpp", f"{SOURCE}/entry.cpp"],
    depends=[str(path) for path in sorted(Path(SOURCE).glob("*.h"))],
    language="c++",
    optional=True,
)

setup(
    packages=[*find_packages(include=["jrnn*"]), "jrnn.configs"],
    package_dir={"jrnn.configs": "configs"},
    ext_modules=[KERNEL] if IS_BUILT else [],
    cmdclass={"build_ext": BuildKernel, **({"bdist_wheel": PlatformWheel} if IS_BUILT else {})},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
