"""Every library that the package imports is declared, and the pinned versions are allowed ones."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    Requirement(text) for text in [*PROJECT["dependencies"], *(one for extra in EXTRAS.values() for one in extra)]
]
# Where the libraries of an extra may be imported without being declared for everyone.
OF_EXTRAS = {"accelerate": "train", "deepspeed": "deepspeed", "flash_attn": "flash", "peft": "train", "ray": "ray"}

# Built for one machine's GPUs, or a tool that audits whatever there is.
UNPINNED = ("deepspeed", "flash-attn", "pip-audit")


def imported_libraries():
    """Top-level modules that the package imports from elsewhere, with one file each."""
    found = {}
    for path in sorted((ROOT / "refusion_eval").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            found.update({name.partition(".")[0]: path.relative_to(ROOT) for name in names})
    return {name: path for name, path in found.items() if name not in {*sys.stdlib_module_names, "refusion_eval"}}


LIBRARIES = imported_libraries()


def names(texts):
    return {canonicalize_name(Requirement(text).name) for text in texts}


def test_the_search_finds_libraries():
    assert {"torch", "yaml", "PIL", "jinja2", "lm_eval"} <= set(LIBRARIES)


@pytest.mark.parametrize("module", sorted(LIBRARIES))
def test_an_imported_library_is_declared(module):
    declared = names(EXTRAS[OF_EXTRAS[module]] if module in OF_EXTRAS else PROJECT["dependencies"])
    # What is not installed here has the name of its module.
    provided_by = {canonicalize_name(name) for name in packages_distributions().get(module, [module])}
    assert provided_by & declared, f"{LIBRARIES[module]} imports {module}, which pyproject.toml does not declare"


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_a_declared_library_has_a_lower_bound_that_its_pinned_version_keeps(requirement):
    assert any(bound.operator == ">=" for bound in requirement.specifier), f"{requirement}: give a lower bound"
    pinned = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8")))
    version = {canonicalize_name(name): version for name, version in pinned.items()}.get(
        canonicalize_name(requirement.name)
    )
    assert version is None or requirement.specifier.contains(version, prereleases=True)
    assert version is not None or requirement.name in UNPINNED, f"{requirement.name} is not pinned"
