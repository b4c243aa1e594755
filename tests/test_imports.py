"""Who may import whom, read from the sources: no arrow points backwards."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "refusion_eval"
BASE = {"types", "trace", "errors"}

# Part of the package -> the parts it may import besides itself. A part is a folder or a top-level module.
MAY_IMPORT = {
    "errors": set(),
    "trace": set(),
    "types": {"trace"},
    "decoders": BASE,
    "models": BASE,
    "engine": BASE | {"models"},
    "loading": BASE | {"engine", "models"},
    "api": BASE | {"decoders", "engine", "loading", "models"},
    "hf": BASE | {"api", "decoders", "engine", "loading", "models"},
    "metrics": BASE,
    "store": BASE | {"metrics"},
    "report": BASE | {"metrics", "store"},
    "embedded": set(),
    "supply_chain": set(),
    "artefacts": BASE | {"evaluate", "metrics", "store"},
    # The one pair that knows each other: lm-eval's adapter asks who decodes, and workers decode as it would itself.
    "evaluate": BASE | {"api", "decoders", "embedded", "engine", "hf", "metrics", "models", "scaleout", "store"},
    "scaleout": BASE | {"api", "decoders", "evaluate", "store"},
    "paper": BASE | {"artefacts", "decoders", "evaluate", "metrics", "report", "store"},
    "sweep": BASE | {"decoders", "evaluate", "store"},
    "bench": BASE
    | {"api", "decoders", "embedded", "engine", "evaluate", "hf", "models", "scaleout", "store", "training"},
    "training": BASE | {"api", "decoders", "embedded", "engine", "evaluate", "models", "store"},
}
NO_TORCH = {"types", "trace", "errors", "decoders", "metrics", "store", "artefacts", "report"}
ONLY_IN = {
    "ray": {"scaleout/"},
    "lm_eval": {"evaluate/lm_eval_adapter.py", "evaluate/run.py", "evaluate/stock_filters.py", "cli/decoding.py"},
    "transformers": {"models/tokenizer.py", "models/config.py", "hf/", "training/", "bench/"},
}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def imported(path):
    """Absolute names of everything that a module imports, wherever in the module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import absolutely"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_layers(path):
    part = part_of(path)
    names = list(imported(path))
    if part in MAY_IMPORT:
        ours = {name.split(".")[1] for name in names if name.startswith("refusion_eval.")}
        allowed = MAY_IMPORT[part] | {part, "__version__"}
        assert ours <= allowed, f"{part} may not import {sorted(ours - allowed)}"
    if part in NO_TORCH:
        assert not any(name.split(".")[0] == "torch" for name in names)
    for library, places in ONLY_IN.items():
        if any(name.split(".")[0] == library for name in names):
            where = path.relative_to(PACKAGE).as_posix()
            assert any(where == place or (place.endswith("/") and where.startswith(place)) for place in places)


def test_every_part_has_a_rule():
    without_rule = {part_of(path) for path in SOURCES} - MAY_IMPORT.keys()
    assert without_rule <= {"__init__", "__main__", "cli", "doctor"}


def test_the_startup_module_imports_only_sys():
    assert set(imported(ROOT / "_refusion_eval_autoload.py")) == {"sys"}
