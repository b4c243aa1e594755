"""Every table and figure of the paper from the runs of a suite, its ablations and its sweeps (`--artefacts`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refusion_eval.paths import embedded_names

if TYPE_CHECKING:
    from refusion_eval.scripts.suite import Suite

SPECS = Path(__file__).parents[1] / "sweep" / "specs"
PUBLISHED_REFUSION, PUBLISHED_BASELINE = "GSAI-ML/ReFusion", "Qwen/Qwen3-8B"
EMBEDDED = "embedded"


class Artefacts:
    """Makes tables, figures and the page of samples. A part that fails is named, and the others are made.

    Args:
        suite: the runs that the artefacts are about.
    """

    def __init__(self, suite: "Suite") -> None:
        self._suite = suite
        model = suite.model or EMBEDDED
        self._model = PUBLISHED_REFUSION if model == "published" else model
        self._is_embedded = self._model == EMBEDDED
        self._baseline = EMBEDDED if self._is_embedded else suite.baseline or PUBLISHED_BASELINE
        self._family = self._model.rstrip("/").rpartition("/")[2]
        self._out = f"{suite.results}/{self._family}/artefacts"

    def make(self) -> None:
        """Makes all parts."""
        suite, out, task = self._suite, self._out, self._task("mbpp")
        suite.make_folder(out)
        self._ablation("recompute_kv", suite.given.tasks, "recompute_kv=true")
        self._ablation("left_to_right", task, "left_to_right=true")
        self._part("paper-table", "all", *suite.run_dirs, "--out", out)
        self._part("plot", "figure1", *suite.run_dirs, "--task", task, "--out", out)
        self._part("claims", *suite.run_dirs, "--out", out)
        refusion = suite.refusion_run
        self._part("compare", refusion, f"{refusion}-recompute_kv", *self._files("compare_recompute_kv"))
        self._stock_loop()
        suite.write_table(out)
        self._part("speed", *suite.run_dirs, *self._files("speed"), *suite.reference)
        self._part("cost", *suite.run_dirs, *self._files("cost"))
        self._locality()
        for figure in ("figure4", "figure6", "figure8"):
            self._sweep(figure)
        for figure in ("figure5", "figure9"):
            self._part("plot", figure, refusion, "--task", task, "--out", out)
        self._part("replay", refusion, "--task", task, "--out", f"{out}/replay.gif")
        # The page holds every sample, so it is too large for a folder that is kept in the repository.
        page = f"{suite.results}/reports/{self._family}.html"
        data = ["--data", suite.given.data] if suite.given.data else []
        self._part("report", *suite.run_dirs, "--out", page, *data, *suite.reference)
        # Results of variants that were trained on more and less data come from elsewhere.
        scaling = f"{suite.results}/{self._family}/scaling.csv"
        if Path(scaling).is_file():
            self._part("plot", "figure7", scaling, "--out", out)
        print(f"Tables and figures: {out}", flush=True)

    def _part(self, *arguments: str) -> None:
        status = self._suite.step(*arguments)
        if status == 3:  # finished, with failed samples
            self._suite.status = status
        else:
            what = f"'{arguments[0]} {arguments[1].rpartition('/')[2]}' failed, and what needs it is missing"
            self._suite.go_on_without(status, what)

    def _files(self, name: str) -> tuple[str, ...]:
        return "--csv", f"{self._out}/{name}.csv", "--markdown", f"{self._out}/{name}.md"

    def _task(self, default: str) -> str:
        """Returns the benchmark of a figure: the default, or the first that was asked for if the default was not."""
        asked = self._suite.given.tasks.replace("mini_", "")
        names = asked.split(",")
        return default if not asked or default in names else names[0]

    def _ablation(self, name: str, tasks: str, setting: str) -> None:
        """Runs ReFusion with another setting."""
        suite = self._suite
        run_dir = f"{suite.refusion_run}-{name}"
        arguments = ("--model", self._model, "--decoder", "refusion", *suite.refusion_settings, "--set", setting)
        suite.go_on_without(suite.evaluate(run_dir, *arguments, tasks=tasks), f"{run_dir} failed")

    def _stock_loop(self) -> None:
        """Runs the autoregressive system by transformers' generate, so that speed is known for both loops."""
        suite = self._suite
        run_dir = f"{suite.results}/runs/{self._baseline.rpartition('/')[2]}-autoregressive-generate"
        thinking = () if self._baseline == EMBEDDED else ("--no-thinking",)
        arguments = ("--model", self._baseline, "--decoder", "autoregressive", *thinking, "--loop", "generate")
        status = suite.evaluate(run_dir, *arguments)
        suite.go_on_without(status, f"{run_dir} failed, and speed-ups over it are missing")

    def _locality(self) -> None:
        suite, csv = self._suite, f"{self._out}/locality.csv"
        data = ["--data", suite.given.data] if suite.given.data else []
        limit = ["--responses", suite.given.limit] if suite.given.limit else []
        self._part("locality", "--model", self._model, "--out", csv, *data, *limit)
        if suite.given.dry_run or Path(csv).is_file():
            self._part("plot", "figure3", csv, "--out", self._out)

    def _sweep(self, figure: str) -> None:
        suite, folder = self._suite, f"{self._suite.results}/sweeps/{self._family}-{figure}"
        # The tiny models answer every item of mini MBPP right.
        task = self._task("gsm8k" if self._is_embedded else "mbpp")
        file = f"{folder}/{figure}.yaml"
        if not suite.given.dry_run:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_spec(figure, task, Path(file), model=self._model, baseline=self._baseline)
        self._part("sweep", file, "--out", folder, *suite.common)
        if suite.given.dry_run or Path(folder, "sweep.csv").is_file():
            self._part("plot", figure, folder, "--task", task, "--out", self._out)


def write_spec(figure: str, task: str, path: Path, *, model: str, baseline: str) -> None:
    """Writes the sweep of a figure for other checkpoints and another task than those of the package's own sweep.

    Args:
        figure: name of the sweep in the package.
        task: benchmark to sweep.
        path: file to write.
        model: ReFusion checkpoint; "embedded" keeps the systems of the mini sweep that have a checkpoint here.
        baseline: autoregressive checkpoint.
    """
    import yaml  # installed by now: sweeps run in the environment that eval.sh made

    is_embedded = model == EMBEDDED
    spec: dict[str, Any] = yaml.safe_load((SPECS / f"{'mini_' * is_embedded}{figure}.yaml").read_text(encoding="utf-8"))
    systems: Mapping[str, dict[str, Any]] = spec["systems"]
    if is_embedded:
        spec["systems"] = {name: row for name, row in systems.items() if name in embedded_names()}
    else:
        for row in systems.values():
            arguments = row["arguments"]
            if arguments == {"system": "refusion"}:
                arguments["model"] = model
                row["settings"] = {"fuse": False}
            elif arguments == {"system": "qwen3"}:
                arguments["model"] = baseline
    path.write_text(yaml.safe_dump(spec | {"tasks": [task]}, sort_keys=False), encoding="utf-8")
