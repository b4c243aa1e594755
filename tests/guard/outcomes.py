"""Runs the guarded commands with the code of this checkout, many in one process, and reads what they left."""

import json
import shutil
from pathlib import Path

from tests.guard import cases, records


class Outcomes:
    """What the commands of one session left, below one folder."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.places = cases.places(scratch)
        self.ended: dict[str, dict] = {}

    def execute(self, runs: list[str], texts: list[str]) -> None:
        commands = []
        for name in runs:
            arguments = cases.RUNS[name].arguments(self._folder("run", name), self.places)
            commands.append((f"run {name}", cases.RUN_MODULE, arguments))
        for name in texts:
            self._folder("text", name).mkdir(parents=True)
            commands.append((f"text {name}", cases.RUN_MODULE, self.text_arguments(name)))
        self._run(commands)

    def execute_lm_eval(self, names: list[str]) -> None:
        task_path = cases.execute([("path", cases.RUN_MODULE, ["tasks-path"])], self.scratch / "path", self.scratch)
        include = task_path["path"]["stdout"].strip()
        commands = []
        for name in names:
            options, model = cases.LM_EVAL[name]
            folder = self._folder("lm_eval", name)
            model = f"{model},run_dir={folder / 'run'},warmup=0".format(**self.places)
            # Likelihood tasks lie in a folder of their own.
            tasks = str(cases.FOLDER / "lm_eval_tasks") if "guard_choice" in options else include
            arguments = ["--model", "refusion", "--model_args", model, "--include_path", tasks, "--log_samples"]
            arguments += ["--output_path", str(folder / "out"), "--tasks", *options.split()]
            commands.append((f"lm_eval {name}", "lm_eval", arguments))
        self._run(commands)

    def _run(self, commands: list[tuple[str, str, list[str]]]) -> None:
        if commands:
            self.ended |= cases.execute(commands, self.scratch / f"batch_{len(self.ended)}", self.scratch)

    def run(self, name: str) -> dict:
        return records.read_run(self._good("run", name))

    def text(self, name: str) -> dict[str, str]:
        folder = self._good("text", name)
        replaced = {str(folder): "FOLDER", str(cases.ROOT): "ROOT"}
        return records.read_texts(folder, self.ended[f"text {name}"], cases.TEXT_FILES, replaced)

    def lm_eval(self, name: str) -> dict:
        folder = self._good("lm_eval", name)
        read = records.read_lm_eval(folder / "out")
        return read | ({"run": records.read_run(folder / "run")} if (folder / "run" / "run.json").is_file() else {})

    def text_arguments(self, name: str) -> list[str]:
        """Arguments with files below the command's own folder, as all commands of a batch stand in one."""
        folder = self._folder("text", name)
        arguments = [part.format(**self.places) for part in cases.TEXTS[name]]
        for index, part in enumerate(arguments):
            if part == "." or (part.endswith((".csv", ".md", ".jsonl")) and "/" not in part):
                arguments[index] = str(folder / part)
        if name == "score_texts":
            (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in cases.SCORED))
        return arguments

    def _folder(self, kind: str, name: str) -> Path:
        return self.scratch / kind / name

    def _good(self, kind: str, name: str) -> Path:
        outcome = self.ended[f"{kind} {name}"]
        assert outcome["status"] == 0, f"{kind} {name}: status {outcome['status']}\n{outcome['stderr']}"
        return self._folder(kind, name)

    def continue_stored(self) -> dict[Path, Path]:
        """The stored runs, continued in copies with more items than they have, then shown; stored run -> copy."""
        commands, copies = [], {}
        for run_dir, arguments in cases.STORED.items():
            copies[run_dir] = shutil.copytree(run_dir, self._folder("stored", run_dir.name))
            given = [*arguments, "--limit", str(cases.CONTINUED_LIMIT), "--run-dir", str(copies[run_dir])]
            commands.append((f"stored {run_dir.name}", cases.RUN_MODULE, given))
        given = [str(path) for path in copies.values()]
        for command, option, name in (("report", "--out", "report.html"), ("table", "--csv", "table.csv")):
            arguments = [command, *given, option, str(self.scratch / name)]
            commands.append((f"stored {command}", cases.RUN_MODULE, arguments))
        self._run(commands)
        return copies
