"""Sphinx: pages in Markdown (MyST), the API reference from docstrings in Google's style. scripts/docs.sh builds it."""

import functools
import importlib
import inspect
import json
import re
import runpy
import tomllib
from pathlib import Path

import jrnn
from jrnn.version import __version__

project = "jrnn"
author = "the authors of jrnn"
copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["benchmarks", "_generated"]
suppress_warnings = ["ref.python"]  # attributes of two classes may have one name
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "code"  # docstrings write `x`, as Markdown does

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay short: docstrings give types and shapes
autosummary_generate = False
napoleon_use_rtype = False
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

html_theme = "sphinx_book_theme"
html_title = f"jrnn {version}"
html_static_path = ["_static"]
html_css_files = ["jrnn.css"]
html_js_files = ["jrnn.js"]
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
    "navbar_persistent": [],  # the sidebar has the search
}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system has it
html_copy_source = False
html_show_sourcelink = False

# Links to the repository, its issues and each page's source, and a choice of versions, where pyproject.toml names the sites.
ROOT = Path(__file__).parents[1]
urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get(
    "urls", {}
)
if "Repository" in urls:
    html_theme_options |= {
        "repository_url": urls["Repository"],
        "repository_branch": "main",
        "path_to_docs": "docs",
        "use_repository_button": True,
        "use_issues_button": True,
        "use_source_button": True,
    }
if "Documentation" in urls:  # the site has a switcher.json: a list of {"version": ..., "url": ...}
    site = urls["Documentation"].rstrip("/")
    html_theme_options |= {
        "switcher": {"json_url": f"{site}/switcher.json", "version_match": version},
        "primary_sidebar_end": ["version-switcher"],
        "check_switcher": False,
    }


generated = Path(__file__).parent / "_generated"
notebooks = (
    generated / "site" / "notebooks"
)  # the programs of examples/; `scripts/notebooks.py FOLDER --run` also runs them
notebooks.mkdir(parents=True, exist_ok=True)
make = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))
for program in sorted((ROOT / "examples").glob("*.py")):
    text = json.dumps(make["notebook"](make["cells_of"](program)), indent=1)
    (notebooks / f"{program.stem}.ipynb").write_text(text + "\n", encoding="utf-8")
html_extra_path = ["_generated/site"]


def entries(block):
    """Entries of a block of names in docs/api: `Name` with its members, `Name()` with none, `Name(a, b)` with these."""
    importlib.import_module(block[1])
    lines = ["```{eval-rst}"]
    for name, chosen in re.findall(r"([\w.]+)(\([^)]*\))?", block[2]):
        value = functools.reduce(getattr, f"{block[1]}.{name}".split(".")[1:], jrnn)
        kind = (
            "function"
            if not inspect.isclass(value)
            else "exception"
            if issubclass(value, Exception)
            else "class"
        )
        if kind == "function" and not inspect.isfunction(
            value
        ):  # an object that is called, as a kind of layer
            arguments = ", ".join(inspect.signature(value).parameters)
            said = f"Layers of `{value.cell.__name__}`: {value.cell.__doc__.splitlines()[0]}"
            lines += [f".. py:function:: {block[1]}.{name}({arguments})", "", f"   {said}", ""]
            continue
        lines.append(f".. auto{kind}:: {block[1]}.{name}")
        if kind == "class" and chosen != "()":
            lines += [
                f"   :members: {' '.join(chosen.strip('()').split())}",
                "   :special-members: __call__",
            ]
    return "\n".join([*lines, "", "```"])


NAMES = re.compile(r"^```\{names\} ([\w.]+)\n(.*?)\n```$", re.M | re.S)
NOTEBOOK = re.compile(r"`(\w+\.ipynb)`")


def expand(app, docname, source):
    """Makes entries of blocks of names, and adds what the site alone has: notebooks, and files next to the folder docs."""
    if docname == "changelog":
        source[0] = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    source[0] = NAMES.sub(entries, source[0])
    if docname == "examples":
        source[0] = NOTEBOOK.sub(r'<a href="notebooks/\1" download>\1</a>', source[0])


def setup(app):
    app.connect("source-read", expand)


def contents():
    """llms.txt: what jrnn is, and each page with its first paragraph, for programs that read documentation."""
    lines = [
        "# jrnn\n\n> jrnn makes loops over time in JAX faster, and checks their gradients three ways, "
        "in float64.\n\n## Pages\n"
    ]
    docs = ROOT / "docs"
    for page in sorted([*docs.glob("*.md"), *docs.glob("api/*.md")]):
        source = re.sub(
            r"\A---\n.*?---\n+", "", page.read_text(encoding="utf-8"), flags=re.S
        )  # without front matter
        title, _, text = source.partition("\n")
        if title.startswith("# "):
            about = " ".join(text.strip().partition("\n\n")[0].split())
            lines.append(f"- [{title[2:]}]({page.relative_to(docs).with_suffix('.html')}): {about}")
    return "\n".join(lines) + "\n"


(generated / "site" / "llms.txt").write_text(contents(), encoding="utf-8")
