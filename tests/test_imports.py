"""Which part of the package may import which, read from the sources."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "refusion_eval"
BASE = {"types", "errors", "untrusted", "own_time", "version"}

# Part of the package -> the parts that it may import besides itself. A part is a folder or a top-level module.
# A part stands below every part that it imports, so that no circle is possible.
MAY_IMPORT = {
    "own_time": set(),
    "untrusted": {"own_time"},
    "errors": {"untrusted"},
    "types": set(),
    "embedded": set(),
    "version": set(),
    "config": BASE,
    "decoders": BASE | {"config"},
    "models": BASE,
    "engine": BASE | {"models"},
    "loading": BASE | {"config", "decoders", "engine", "models", "paths"},
    "api": BASE | {"config", "decoders", "engine", "loading", "models"},
    "paths": BASE | {"embedded"},
    "metrics": BASE,
    "store": BASE,
    "sandbox": BASE,
    "benchmarks": BASE | {"config", "paths"},
    "runs": BASE | {"api", "benchmarks", "config", "decoders", "engine", "models", "paths", "store"},
    "results": BASE | {"benchmarks", "config", "metrics", "runs", "store"},
    "scoring": BASE | {"benchmarks", "config", "decoders", "metrics", "results", "runs", "sandbox", "store"},
    "scaleout": BASE | {"api", "benchmarks", "config", "engine", "runs", "store"},
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
    "data_frame": BASE | {"api", "benchmarks", "config", "evaluation", "lm_eval_plugin", "paths", "results", "runs"},
    "sweep": BASE | {"config", "decoders", "evaluation", "lm_eval_plugin", "paths", "results", "runs", "store"},
    "protocol": BASE
    | {"benchmarks", "config", "decoders", "evaluation", "metrics", "paths", "results", "runs", "store"},
    "report": BASE | {"benchmarks", "metrics", "results", "store"},
    "exports": BASE | {"benchmarks", "metrics", "report", "results", "store"},
    "paper": BASE
    | {
        "api",
        "benchmarks",
        "config",
        "decoders",
        "engine",
        "metrics",
        "models",
        "paths",
        "report",
        "results",
        "runs",
        "store",
    },
    "training": BASE | {"api", "benchmarks", "config", "decoders", "embedded", "engine", "models", "store"},
    "bench": BASE
    | {"api", "benchmarks", "config", "decoders", "embedded", "engine", "metrics", "models", "paths", "runs", "store"},
    "doctor": BASE | {"benchmarks", "models", "paths", "sandbox", "store"},
}
UNLIMITED = {"__init__", "__main__", "cli"}
NO_TORCH = {
    "types",
    "errors",
    "own_time",
    "untrusted",
    "config",
    "decoders",
    "metrics",
    "store",
    "results",
    "paper",
    "report",
}
# What measures a model inside a part that otherwise reads files.
MEASURES = "paper/locality/"
ONLY_IN = {
    "ray": ("scaleout/",),
    "lm_eval": ("lm_eval_plugin/",),
    "transformers": (
        "models/tokenizer.py",
        "models/template_worker.py",
        "models/stock.py",
        "models/diffusion_gemma.py",
        "runs/stock_loop.py",
        "runs/canvas_loop.py",
        "runs/release_worker.py",
        "training/",
        "bench/",
    ),
}
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}


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
        forbidden = ours - MAY_IMPORT[part] - {part}
        violations += [f"{path}: {other}" for other in sorted(forbidden)]
    assert violations == []


def test_no_part_but_the_command_line_needs_the_paper():
    assert [part for part, others in MAY_IMPORT.items() if "paper" in others] == []


def test_no_two_parts_import_each_other():
    def below(part):
        return set().union(*({other} | below(other) for other in MAY_IMPORT[part]))

    assert [part for part in MAY_IMPORT if part in below(part)] == []


def modules_it_imports(path):
    """Modules of the package that a module imports anywhere, also inside functions."""
    for name in imported(path):
        module = name if name in MODULES else name.rpartition(".")[0]
        if module in MODULES and MODULES[module] != path:
            yield module


def circles(imports):
    """The sets of modules that import each other, directly or through others."""
    below = {}
    for start in imports:
        below[start], waiting = set(), [start]
        while waiting:
            new = imports[waiting.pop()] - below[start]
            below[start] |= new
            waiting += new
    return {
        frozenset(other for other in below[name] if name in below[other]) for name in imports if name in below[name]
    }


def test_no_modules_import_each_other_in_a_circle():
    assert circles({name: set(modules_it_imports(path)) for name, path in MODULES.items()}) == set()


def test_a_circle_is_found_through_other_modules():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert circles(imports) == {frozenset("abc")}


def test_libraries_are_imported_only_where_they_belong():
    violations = []
    for path in SOURCES:
        where = path.relative_to(PACKAGE).as_posix()
        libraries = {name.split(".")[0] for name in imported(path)}
        if part_of(path) in NO_TORCH and "torch" in libraries and not where.startswith(MEASURES):
            violations.append(f"{where}: torch")
        for library in libraries & ONLY_IN.keys():
            if not where.startswith(ONLY_IN[library]):
                violations.append(f"{where}: {library}")
    assert violations == []


def test_the_startup_module_imports_only_sys():
    assert set(imported(ROOT / "_refusion_eval_autoload.py")) == {"sys"}


def test_no_files_of_the_benchmarks_import_each_other_in_a_circle():
    paths = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): path
        for path in (PACKAGE / "benchmarks").rglob("*.py")
    }
    imports = {}
    for name, path in paths.items():
        # A name behind `from` is a file of its own, or stands in the file that is named before it.
        files = (full if full in paths else full.rpartition(".")[0] for full in imported(path))
        imports[name] = set(paths.keys() & files)
    while leaves := {name for name, others in imports.items() if not others}:
        imports = {name: others - leaves for name, others in imports.items() if name not in leaves}
    assert imports == {}


def test_a_checkpoint_is_checked_without_what_loads_for_seconds():
    """The compiler of torch and the models of transformers, which few commands need."""
    code = """
import sys
import refusion_eval.bench.gpu_check
from refusion_eval.models.checkpoint import model_config
from refusion_eval.models.weights import check_weights
from refusion_eval.paths import embedded_path
check_weights(embedded_path("refusion"), model_config(embedded_path("refusion")))
print([name for name in ("torch._dynamo", "transformers.modeling_utils") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
