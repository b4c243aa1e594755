"""Which part of the package may import which, read from the sources."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "refusion_eval"
BASE = {"types", "errors", "untrusted", "child"}

# Part of the package -> the parts that it may import besides itself. A part is a folder or a top-level module.
# A part stands below every part that it imports, so that no circle is possible.
MAY_IMPORT = {
    "untrusted": set(),
    "child": set(),
    "errors": {"untrusted"},
    "types": set(),
    "embedded": set(),
    "config": BASE,
    "decoders": BASE | {"config"},
    "models": BASE,
    "engine": BASE | {"models"},
    "loading": BASE | {"decoders", "engine", "models", "paths"},
    "api": BASE | {"config", "decoders", "engine", "loading", "models"},
    "hf": BASE | {"api", "decoders", "engine", "loading", "models"},
    "paths": BASE | {"embedded"},
    "metrics": BASE,
    "store": BASE,
    "sandbox": BASE,
    "benchmarks": BASE | {"config", "paths"},
    "runs": BASE | {"api", "benchmarks", "config", "decoders", "engine", "hf", "models", "paths", "store"},
    "results": BASE | {"benchmarks", "metrics", "runs", "store"},
    "scoring": BASE | {"benchmarks", "config", "decoders", "metrics", "results", "runs", "sandbox", "store"},
    "scaleout": BASE | {"api", "benchmarks", "config", "runs", "scoring", "store"},
    "evaluation": BASE
    | {"api", "benchmarks", "config", "decoders", "paths", "results", "runs", "scaleout", "scoring", "store"},
    "lm_eval_plugin": BASE
    | {
        "api",
        "benchmarks",
        "config",
        "engine",
        "evaluation",
        "metrics",
        "results",
        "runs",
        "scaleout",
        "scoring",
        "store",
    },
    "data_frame": BASE | {"api", "benchmarks", "evaluation", "lm_eval_plugin", "paths", "results", "runs"},
    "sweep": BASE | {"config", "decoders", "evaluation", "lm_eval_plugin", "results", "runs", "store"},
    "claims": BASE | {"benchmarks", "metrics", "results", "store"},
    "report": BASE | {"benchmarks", "metrics", "results", "store"},
    "figures": BASE | {"benchmarks", "claims", "decoders", "metrics", "paths", "report", "results", "runs", "store"},
    "studies": BASE
    | {"api", "benchmarks", "config", "decoders", "engine", "metrics", "models", "paths", "results", "runs", "store"},
    "training": BASE | {"api", "benchmarks", "config", "decoders", "embedded", "engine", "models", "store"},
    "bench": BASE | {"api", "benchmarks", "decoders", "embedded", "engine", "hf", "models", "paths", "store"},
    "doctor": BASE | {"benchmarks", "models", "paths", "sandbox", "store"},
}
UNLIMITED = {"__init__", "__main__", "cli"}
NO_TORCH = {
    "types",
    "errors",
    "untrusted",
    "child",
    "config",
    "decoders",
    "metrics",
    "store",
    "results",
    "claims",
    "report",
}
ONLY_IN = {
    "ray": ("scaleout/",),
    "lm_eval": ("lm_eval_plugin/",),
    "transformers": (
        "models/tokenizer.py",
        "models/template_worker.py",
        "models/stock.py",
        "hf/",
        "training/",
        "bench/",
    ),
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


def test_every_part_imports_only_parts_below_it():
    violations = []
    for path in SOURCES:
        part = part_of(path)
        if part in UNLIMITED:
            continue
        ours = {name.split(".")[1] for name in imported(path) if name.startswith("refusion_eval.")}
        forbidden = ours - MAY_IMPORT[part] - {part, "__version__"}
        violations += [f"{path}: {other}" for other in sorted(forbidden)]
    assert violations == []


def test_no_two_parts_import_each_other():
    def below(part):
        return set().union(*({other} | below(other) for other in MAY_IMPORT[part]))

    assert [part for part in MAY_IMPORT if part in below(part)] == []


def test_libraries_are_imported_only_where_they_belong():
    violations = []
    for path in SOURCES:
        where = path.relative_to(PACKAGE).as_posix()
        libraries = {name.split(".")[0] for name in imported(path)}
        if part_of(path) in NO_TORCH and "torch" in libraries:
            violations.append(f"{where}: torch")
        for library in libraries & ONLY_IN.keys():
            if not where.startswith(ONLY_IN[library]):
                violations.append(f"{where}: {library}")
    assert violations == []


def test_the_startup_module_imports_only_sys():
    assert set(imported(ROOT / "_refusion_eval_autoload.py")) == {"sys"}
