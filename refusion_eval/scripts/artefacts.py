"""Every table and figure of the paper from the runs of a suite, its ablations and its sweeps (`--artefacts`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refusion_eval.benchmarks import RELEASE, RELEASED, Task, find_task
from refusion_eval.paths import embedded_systems
from refusion_eval.scripts.steps import base_name

if TYPE_CHECKING:
    from refusion_eval.scripts.suite import Suite

SPECS = Path(__file__).parents[1] / "sweep" / "specs"
PUBLISHED_REFUSION, PUBLISHED_BASELINE = "GSAI-ML/ReFusion", "Qwen/Qwen3-8B"
EMBEDDED, PUBLISHED = "embedded", "published"
_CASE = "mbpp"  # the benchmark of the paper's case studies, ablations and sweeps
_GRADED = "mmlu_pro"  # stands in for it in miniature: the tiny models answer every item of mini MBPP right
# One slot at a time, the most certain one first: the tiny models are certain of most slots of a block at once, so that
# the paper's settings show no order.
_ORDERED = "arc_challenge"
# The lines of this answer need nothing of each other, so that the embedded model can write most slots at once.
EXAMPLE = """Lucy was born in January. Lucy plays the drum. Lucy is 24 years old. Lucy works as a cook. Lucy has won \
some plums. Lucy lives in Oslo. Lucy keeps a gecko. Lucy wears white shoes.

Fill the record of Lucy: month, hobby, age, job, prize, city, pet.

Answer each part on its own line, in this order."""
# Options of the paper's algorithm: the default, but no folder of an earlier version must be continued by it.
UNFUSED = ("--set", "fuse=false")


class Artefacts:
    """Makes tables, figures and the page of samples. A part that fails is named, and the others are made."""

    def __init__(self, suite: "Suite") -> None:
        self._suite = suite
        self._model = PUBLISHED_REFUSION if suite.model == PUBLISHED else suite.model
        self._is_embedded = self._model == EMBEDDED
        self._baseline = EMBEDDED if self._is_embedded else suite.given.baseline or PUBLISHED_BASELINE
        self._family = base_name(self._model)
        self._out = f"{suite.tables}/{self._family}/artefacts"

    def make(self) -> None:
        """Makes all parts."""
        suite, out, task, graded = self._suite, self._out, self._task(_CASE), self._graded()
        suite.make_folder(out)
        self._ablation("recompute_kv", suite.given.tasks)
        self._ablation("serial", graded)
        self._part("paper-table", "all", *suite.run_dirs, "--out", out)
        self._part("plot", "figure1", *suite.run_dirs, "--task", graded, "--out", out)
        refusion = suite.refusion_run
        self._part("compare", refusion, f"{refusion}-recompute_kv", *self._files("compare_recompute_kv"))
        self._stock_loop()
        suite.write_table(out)
        self._part("speed", *suite.run_dirs, *self._files("speed"), *suite.reference)
        self._locality()
        for figure in ("figure4", "figure6", "figure8"):
            self._sweep(figure)
        for figure in ("figure5", "figure9"):
            self._part("plot", figure, *self._case(), *suite.options("data"), "--out", out)
        self._claims()
        replayed = ("--prompt", EXAMPLE) if self._is_embedded else (refusion, "--task", task)
        self._part("replay", *replayed, "--seconds", "1.2", "--out", f"{out}/replay.gif")
        # The page holds every sample, so it is too large for a folder that is kept in the repository.
        page = f"{suite.results}/reports/{self._family}.html"
        self._part("report", *suite.run_dirs, "--out", page, *suite.options("data"), *suite.reference)
        # Results of variants that were trained on more and less data come from elsewhere.
        scaling = f"{suite.results}/{self._family}/scaling.csv"
        if Path(scaling).is_file():
            self._part("plot", "figure7", scaling, "--out", out)
        print(f"Tables and figures: {out}", flush=True)

    def _claims(self) -> None:
        """Judges the paper's claims by the runs, and by those sweeps, localities and case studies that are there."""
        suite, out = self._suite, self._out
        studies = [f"{out}/{name}.csv" for name in self._masked_models()]
        studies += map(self._sweep_folder, ("figure4", "figure6", "figure8"))
        studies += [] if self._is_embedded else [f"{out}/case_study"]
        measured = [path for path in studies if suite.given.dry_run or Path(path).exists()]
        self._part("claims", *suite.run_dirs, *measured, "--out", out)

    def _asked(self, benchmark: str) -> str:
        """Returns the task that a benchmark's name means in the runs of the suite."""
        is_released = self._suite.prompts == RELEASE and benchmark in RELEASED
        return Task(RELEASED[benchmark]).name if is_released else benchmark

    def _case(self) -> tuple[str, ...]:
        """Returns the model and task of the case study, and the settings that are not the paper's."""
        task = self._task(_ORDERED if self._is_embedded else _CASE)
        settings = ("--set", "block_size=96", "--set", "tau_slot=1") if self._is_embedded else ()
        return ("--model", self._model, "--task", self._asked(task), *settings)

    def _sweep_folder(self, figure: str) -> str:
        return f"{self._suite.results}/sweeps/{self._family}-{figure}"

    def _part(self, *arguments: str) -> None:
        what = f"'{arguments[0]} {base_name(arguments[1])}' failed, and what needs it is missing"
        self._suite.go_on_without(self._suite.step(*arguments), what)

    def _files(self, name: str) -> tuple[str, ...]:
        return "--csv", f"{self._out}/{name}.csv", "--markdown", f"{self._out}/{name}.md"

    def _task(self, default: str) -> str:
        """Returns the benchmark of a figure: the default, or the first that was asked for if the default was not."""
        asked = self._suite.given.tasks.split(",")
        tasks = [(name, find_task(name)) for name in asked if name]
        names = [name if task is None else task.benchmark.name for name, task in tasks]
        return default if not names or default in names else names[0]

    def _graded(self) -> str:
        """Returns the benchmark of figures that need some answers wrong."""
        return self._task(_GRADED if self._is_embedded else _CASE)

    def _ablation(self, setting: str, tasks: str) -> None:
        """Runs ReFusion with a setting that is off by default."""
        suite = self._suite
        run_dir = f"{suite.refusion_run}-{setting}"
        options = (*UNFUSED, "--set", f"{setting}=true")
        status = suite.evaluate(run_dir, "--model", self._model, "--decoder", "refusion", *options, tasks=tasks)
        suite.go_on_without(status, f"{run_dir} failed")

    def _stock_loop(self) -> None:
        """Runs the autoregressive system by transformers' generate, so that speed is known for both loops."""
        suite = self._suite
        run_dir = f"{suite.runs}/{base_name(self._baseline)}-autoregressive-generate"
        of_real = () if self._baseline == EMBEDDED else suite.real_autoregressive
        arguments = ("--model", self._baseline, "--decoder", "autoregressive", *of_real, "--loop", "generate")
        status = suite.evaluate(run_dir, *arguments)
        suite.go_on_without(status, f"{run_dir} failed, and speed-ups over it are missing")

    def _locality(self) -> None:
        suite, files = self._suite, []
        limit = ["--responses", suite.given.limit] if suite.given.limit else []
        for name, model in self._masked_models().items():
            files.append(f"{self._out}/{name}.csv")
            self._part("locality", "--model", model, "--out", files[-1], *suite.options("data"), *limit)
        files = [file for file in files if suite.given.dry_run or Path(file).is_file()]
        if files:
            self._part("plot", "figure3", *files, "--out", self._out)

    def _masked_models(self) -> dict[str, str]:
        """Name of the CSV of locality -> checkpoint: ReFusion, and the models of the paper's Figure 3 that were run."""
        suite, models = self._suite, {"locality": self._model}
        for name in ("llada", "dream"):
            if name in suite.names and suite.model == EMBEDDED:
                models[f"locality_{name}"] = f"{EMBEDDED}:{name}"
            elif name in suite.names and suite.model == PUBLISHED:
                models[f"locality_{name}"] = suite.pretrained(name)
        return models

    def _sweep(self, figure: str) -> None:
        suite, folder, task = self._suite, self._sweep_folder(figure), self._graded()
        file = f"{folder}/{figure}.yaml"
        if not suite.given.dry_run:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_spec(figure, self._asked(task), Path(file), model=self._model, baseline=self._baseline)
        self._part("sweep", file, "--out", folder, *suite.options("limit", "data", "sandbox"))
        if suite.given.dry_run or Path(folder, "sweep.csv").is_file():
            self._part("plot", figure, folder, "--task", task, "--out", self._out)


def write_spec(figure: str, task: str, path: Path, *, model: str, baseline: str) -> None:
    """Writes the sweep of a figure for one task and these checkpoints instead of those of the package's own sweep.

    For the model `EMBEDDED` these are the systems of the mini sweep that have a checkpoint in the package.
    """
    import yaml  # installed by now: sweeps run in the environment that eval.sh made

    is_embedded = model == EMBEDDED
    spec: dict[str, Any] = yaml.safe_load((SPECS / f"{'mini_' * is_embedded}{figure}.yaml").read_text(encoding="utf-8"))
    systems: Mapping[str, dict[str, Any]] = spec["systems"]
    if is_embedded:
        spec["systems"] = {name: row for name, row in systems.items() if name in embedded_systems()}
    else:
        for row in systems.values():
            arguments = row["arguments"]
            if arguments == {"system": "refusion"}:
                arguments["model"] = model
            elif arguments == {"system": "qwen3"}:
                arguments["model"] = baseline
    path.write_text(yaml.safe_dump(spec | {"tasks": [task]}, sort_keys=False), encoding="utf-8")
