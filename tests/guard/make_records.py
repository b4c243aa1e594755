"""Stores what today's commands leave behind: `python -m tests.guard.make_records [NAME ...]`, from the checkout."""

import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.guard import cases, outcomes, records


def main() -> None:
    chosen = sys.argv[1:]
    cases.RECORDS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="guard_") as folder:
        scratch = Path(folder)
        if not chosen or "stored" in chosen:
            store_runs(scratch)
        made = outcomes.Outcomes(scratch)
        if not chosen or "stored" in chosen:
            for run_dir, copy in made.continue_stored().items():
                write(f"continued_{run_dir.name}", records.read_run(copy))
        runs = [name for name in cases.RUNS if not chosen or name in chosen]
        texts = [name for name in cases.TEXTS if not chosen or name in chosen or "texts" in chosen]
        asked = [name for name in cases.LM_EVAL if not chosen or name in chosen or "lm_eval" in chosen]
        made.execute(runs, texts)
        made.execute_lm_eval(asked)
        for kind, names, read in (
            ("run", runs, made.run),
            ("text", texts, made.text),
            ("lm_eval", asked, made.lm_eval),
        ):
            for name in names:
                try:
                    write(f"{kind}_{name}", read(name))
                except AssertionError as error:
                    print(f"no record: {error}")
                print(f"{made.ended[f'{kind} {name}'].get('seconds', 0):6.1f} s  {kind} {name}")
    write("machine", records.machine())


def write(name: str, record: dict) -> None:
    dumped = json.dumps(record, separators=(",", ":"), sort_keys=True)
    (cases.RECORDS / f"{name}.json").write_text(dumped + "\n")


def store_runs(scratch: Path) -> None:
    """Runs that a later version continues, without the paths of this machine."""
    for run_dir, arguments in cases.STORED.items():
        shutil.rmtree(run_dir, ignore_errors=True)
        command = [sys.executable, "-m", cases.RUN_MODULE, *arguments, "--limit", str(cases.STORED_LIMIT)]
        command += ["--run-dir", run_dir.name]
        subprocess.run(command, cwd=cases.FOLDER, env=cases.environment(scratch), check=True)
        root = f"{cases.ROOT}/"
        connection = sqlite3.connect(run_dir / "records.sqlite", isolation_level=None)
        connection.execute("UPDATE processes SET body = replace(body, ?, '')", (root,))
        connection.execute("UPDATE meta SET value = replace(value, ?, '')", (root,))
        connection.execute("VACUUM")
        connection.close()
        told = run_dir / "run.json"
        told.write_text(told.read_text().replace(root, ""))
        for path in run_dir.iterdir():
            if path.name not in ("records.sqlite", "run.json"):
                path.unlink()


if __name__ == "__main__":
    main()
