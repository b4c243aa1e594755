"""Every library that the package imports is declared, and the pinned versions are allowed ones."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import refusion_eval

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    Requirement(text) for text in [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]
]
# Libraries of an extra that the package may import without declaring them for everyone.
OF_EXTRAS = {"accelerate": "train", "deepspeed": "deepspeed", "flash_attn": "flash", "ray": "ray"}
OF_EXTRAS |= {"httpx2": "server", "tenacity": "server"}
# A part of torch's builds for CUDA, where it is used; for builds for CPUs the extra brings it for tests.
OF_EXTRAS["triton"] = "dev"

# The first is built for the GPUs of one machine; trackers follow the versions of their servers.
UNPINNED = ("flash-attn", "wandb", "trackio", "mlflow")


@cache
def imported_libraries():
    """Top-level modules of other projects that the package imports, each with one file that imports it."""
    found = {}
    for path in sorted((ROOT / "refusion_eval").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            found.update({name.partition(".")[0]: path.relative_to(ROOT) for name in names})
    return {name: path for name, path in found.items() if name not in {*sys.stdlib_module_names, "refusion_eval"}}


def names(texts):
    return {canonicalize_name(Requirement(text).name) for text in texts}


def test_the_search_finds_libraries():
    assert {"torch", "yaml", "PIL", "jinja2", "lm_eval"} <= set(imported_libraries())


def test_every_imported_library_is_declared():
    undeclared, distributions = [], packages_distributions()
    for module, path in imported_libraries().items():
        declared = names(EXTRAS[OF_EXTRAS[module]] if module in OF_EXTRAS else PROJECT["dependencies"])
        # A library that is not installed here is assumed to have the name of its module.
        provided_by = {canonicalize_name(name) for name in distributions.get(module, [module])}
        if not provided_by & declared:
            undeclared.append(f"{path} imports {module}")
    assert undeclared == []


def test_every_declared_library_has_a_lower_bound_that_its_pinned_version_keeps():
    lines = re.findall(r"(?m)^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    pinned = {canonicalize_name(name): version for name, version in lines}
    wrong = []
    for requirement in REQUIREMENTS:
        version = pinned.get(canonicalize_name(requirement.name))
        if not any(bound.operator == ">=" for bound in requirement.specifier):
            wrong.append(f"{requirement}: give a lower bound")
        if version is None and requirement.name not in UNPINNED:
            wrong.append(f"{requirement.name} is not pinned")
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement}: constraints.txt pins {version}")
    assert wrong == []


def test_the_citation_and_the_changes_name_the_version_of_the_package():
    version, released = refusion_eval.__version__, r"\d{4}-\d\d-\d\d"
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    date = re.search(rf"(?m)^version: {re.escape(version)}\ndate-released: ({released})$", citation)[1]
    headings = re.findall(r"(?m)^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert headings[:2] == ["Unreleased", f"{version} ({date})"]
