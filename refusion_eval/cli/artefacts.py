"""Every table and figure of the paper from the runs of a suite, its ablations and its sweeps (`suite --artefacts`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from refusion_eval.benchmarks import PUBLISHED, RELEASE, RELEASED, Task, find_task
from refusion_eval.cli.parameters import names_of
from refusion_eval.cli.suite_runs import (
    ALL_PUBLISHED,
    AS_IN_THE_PAPER,
    PUBLISHED_BASELINE,
    PUBLISHED_REFUSION,
    UNFUSED,
    Suite,
)
from refusion_eval.paper.studies import GRADED
from refusion_eval.paths import EMBEDDED, embedded_systems
from refusion_eval.runs.systems import published_systems
from refusion_eval.sweep.spec import SPECS

SWEEPS = ("figure4", "figure6", "figure8")
_CASE = "mbpp"  # the benchmark of the paper's case studies, ablations and sweeps
# The tiny models are certain of most slots of a block at once, so that a block with the paper's threshold fills in
# reading order; with this one several slots an iteration become final, not all in reading order.
_CASE_SETTINGS = {"settings": ("block_size=96", "tau_slot=0.97")}
# The lines of this answer need nothing of each other, so that the embedded model can write most slots at once.
EXAMPLE = """Lucy was born in January. Lucy plays the drum. Lucy is 24 years old. Lucy works as a cook. Lucy has won \
some plums. Lucy lives in Oslo. Lucy keeps a gecko. Lucy wears white shoes.

Fill the record of Lucy: month, hobby, age, job, prize, city, pet.

Answer each part on its own line, in this order."""


class Artefacts:
    """Makes tables, figures and the page of samples. A part that fails is named, and the others are made."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._model = PUBLISHED_REFUSION if suite.model == ALL_PUBLISHED else suite.model
        self._is_embedded = self._model == EMBEDDED
        self._baseline = EMBEDDED if self._is_embedded else suite.given.baseline or PUBLISHED_BASELINE
        self._family = Path(self._model).name
        self._out = f"{suite.tables}/{self._family}/artefacts"

    def make(self) -> None:
        suite, out, task = self._suite, self._out, self._task(_CASE)
        refusion, data = suite.refusion_run, suite.values("data")
        graded = self._task(GRADED if self._is_embedded else _CASE)  # for figures that need some answers wrong
        ablated = {"model": self._model, "decoder": "refusion"}
        self._run(f"{refusion}-recompute_kv", {**ablated, "settings": [UNFUSED, "recompute_kv=true"]})
        self._run(f"{refusion}-serial", {**ablated, "settings": [UNFUSED, "serial=true"]}, tasks=graded)
        self._part("paper-table", "all", *suite.run_dirs, out=out)
        self._part("plot", "figure1", *suite.run_dirs, task=graded, out=out)
        self._part("compare", refusion, f"{refusion}-recompute_kv", **self._files("compare_recompute_kv"))
        # The autoregressive system by transformers' generate as well, so that speed is known for both loops.
        generate = f"{suite.runs}/{Path(self._baseline).name}-autoregressive-generate"
        of_backbone = {} if self._is_embedded else AS_IN_THE_PAPER
        options = {"model": self._baseline, "decoder": "autoregressive", **of_backbone, "loop": "generate"}
        self._run(generate, options)
        suite.write_table(out)
        self._part("speed", *suite.run_dirs, **self._files("speed"), **suite.reference)
        self._locality()
        for figure in SWEEPS:
            self._sweep(figure, graded)
        settings = _CASE_SETTINGS if self._is_embedded else {}
        for figure in ("figure5", "figure9"):
            self._part("plot", figure, model=self._model, task=self._asked(graded), **settings, **data, out=out)
        # The claims are judged by the runs, and by those sweeps, localities and case studies that are there.
        studies = [f"{out}/{name}.csv" for name in self._masked_models()] + list(map(self._sweep_folder, SWEEPS))
        studies += [] if self._is_embedded else [f"{out}/case_study"]
        self._part("claims", *suite.run_dirs, *filter(self._is_there, studies), out=out)
        replayed = {"prompt": EXAMPLE} if self._is_embedded else {"task": task}
        run_dirs = () if self._is_embedded else (refusion,)
        self._part("replay", *run_dirs, **replayed, seconds=1.2, out=f"{out}/replay.gif")
        # The page holds every sample, so it is too large for a folder that is kept in the repository.
        page = f"{suite.results}/reports/{self._family}.html"
        self._part("report", *suite.run_dirs, out=page, **data, **suite.reference)
        # Results of variants that were trained on more and less data come from elsewhere.
        scaling = f"{suite.results}/{self._family}/scaling.csv"
        if Path(scaling).is_file():
            self._part("plot", "figure7", scaling, out=out)
        if not self._suite.given.dry_run:
            print(f"Tables and figures: {out}", flush=True)

    def _part(self, command: str, *arguments: str, **options: Any) -> None:
        status = self._suite.step(command, *arguments, **options)
        part = " ".join((command, *(Path(argument).name for argument in arguments[:1])))
        self._suite.go_on_without(status, f"'{part}' failed, and what needs it is missing")

    def _is_there(self, path: str) -> bool:
        return self._suite.given.dry_run or Path(path).exists()

    def _asked(self, benchmark: str) -> str:
        """The task that a benchmark's name means in the runs of the suite."""
        real = RELEASED if self._suite.prompts == RELEASE else PUBLISHED
        return benchmark if self._is_embedded or benchmark not in real else Task(real[benchmark]).name

    def _task(self, default: str) -> str:
        """The benchmark of a figure: the default, or the first that was asked for if the default was not."""
        tasks = {name: find_task(name) for name in names_of(self._suite.given.tasks)}
        names = [task.benchmark.name if task else name for name, task in tasks.items()]
        return default if not names or default in names else names[0]

    def _files(self, name: str) -> dict[str, str]:
        return {"csv": f"{self._out}/{name}.csv", "markdown": f"{self._out}/{name}.md"}

    def _run(self, run_dir: str, options: Mapping[str, Any], tasks: str | None = None) -> None:
        status = self._suite.take(self._suite.planned(run_dir, run_dir, options, tasks), None)
        self._suite.go_on_without(status, f"{run_dir} failed, and what needs it is missing")

    def _locality(self) -> None:
        limit = self._suite.given.limit
        options = {**self._suite.values("data"), **({"responses": limit} if limit else {})}
        models = self._masked_models()
        for name, model in models.items():
            self._part("locality", model=model, out=f"{self._out}/{name}.csv", **options)
        if files := list(filter(self._is_there, (f"{self._out}/{name}.csv" for name in models))):
            self._part("plot", "figure3", *files, out=self._out)

    def _masked_models(self) -> dict[str, str]:
        """Name of the CSV of locality -> checkpoint: ReFusion, and the models of the paper's Figure 3 that were run."""
        models = {"locality": self._model}
        if self._suite.model in (EMBEDDED, ALL_PUBLISHED):
            for name in (name for name in ("llada", "dream") if name in self._suite.names):
                published = str(published_systems()[name].pretrained)
                models[f"locality_{name}"] = f"{EMBEDDED}:{name}" if self._is_embedded else published
        return models

    def _sweep_folder(self, figure: str) -> str:
        return f"{self._suite.results}/sweeps/{self._family}-{figure}"

    def _sweep(self, figure: str, graded: str) -> None:
        suite, folder = self._suite, self._sweep_folder(figure)
        file = Path(folder, f"{figure}.yaml")
        if not suite.given.dry_run:
            file.parent.mkdir(parents=True, exist_ok=True)
            graphs = None if not suite.given.no_cuda_graphs else False
            checkpoints = {"model": self._model, "baseline": self._baseline}
            write_spec(figure, self._asked(graded), file, **checkpoints, cuda_graphs=graphs)
        options = suite.values("include_path", "limit", "data", "sandbox", "rounds")
        self._part("sweep", str(file), out=folder, **options)
        if self._is_there(f"{folder}/sweep.csv"):
            self._part("plot", figure, folder, task=graded, out=self._out)


def write_spec(
    figure: str, task: str, path: Path, *, model: str, baseline: str, cuda_graphs: bool | None = None
) -> None:
    """Writes the package's sweep of a figure for one task with these checkpoints, or with those in the package."""
    is_embedded = model == EMBEDDED
    spec: dict[str, Any] = yaml.safe_load((SPECS / f"{'mini_' * is_embedded}{figure}.yaml").read_text(encoding="utf-8"))
    if is_embedded:
        spec["systems"] = {name: row for name, row in spec["systems"].items() if name in embedded_systems()}
    else:
        checkpoints = {"refusion": model, "qwen3": baseline}
        for row in spec["systems"].values():
            arguments = row["arguments"]
            if arguments.keys() == {"system"} and arguments["system"] in checkpoints:
                arguments["model"] = checkpoints[arguments["system"]]
    if cuda_graphs is not None:
        for row in spec["systems"].values():
            row["arguments"]["cuda_graphs"] = cuda_graphs
    path.write_text(yaml.safe_dump(spec | {"tasks": [task]}, sort_keys=False), encoding="utf-8")
