from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import typer

from refusion_eval import cli
from refusion_eval.cli import parameters
from refusion_eval.cli.protocol_runs import SUITE_CONTINUES, ProtocolRuns, allowed_by
from refusion_eval.errors import ConfigError
from refusion_eval.protocol.spec import shipped_protocols
from refusion_eval.runs.terminal import Interruption


def protocol(
    action: Annotated[
        Literal["run", "check", "diff", "list"],
        typer.Argument(
            help="run it, or continue it; check it and print what would be run; diff, what differs between two "
            "protocols, or a protocol and a run; list those of the package."
        ),
    ],
    files: Annotated[
        list[str] | None,
        typer.Argument(help="A YAML file or the name of a protocol of the package; of diff two, also run directories."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of runs and table. The default is results/protocols/NAME-HASH.")
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Some of the tasks, separated by commas. Others than the file's are another protocol.")
    ] = "",
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Only so many items of every task. More than the file's are another protocol."),
    ] = None,
    data: parameters.Data = None,
    sandbox: parameters.Sandbox = "auto",
    allow_code: parameters.AllowCode = False,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            help="Variable that holds the key of the file's servers. Only you may name it beside their hosts."
        ),
    ] = None,
    dry_run: parameters.DryRun = False,
    as_json: parameters.Json = False,
) -> None:
    """Run, check or compare protocols. A protocol is one file with all that decides the numbers of an evaluation.

    Records, tables and figures name the protocol and its hash; a changed protocol is another one.
    """
    if action == "list":
        print("\n".join(shipped_protocols()))
        return
    names, wanted = files or [], 2 if action == "diff" else 1
    if len(names) != wanted:
        raise ConfigError(f"protocol {action} takes {wanted} {'names' if wanted > 1 else 'name'}, not {len(names)}")
    name = names[0]
    given: dict[str, Any] = {"tasks": tasks, "limit": limit, "rounds": None, "no_baseline": False}
    given |= {"data": data, "sandbox": sandbox, "dry_run": dry_run, "as_json": as_json}
    options = SimpleNamespace(**given, allow_code=allow_code, api_key_env=api_key_env)
    if action == "diff":
        from refusion_eval.protocol.compare import protocol_differences

        found = protocol_differences(name, names[1], **allowed_by(options))
        cli.tell("\n".join(found) if found else "no field differs")
        raise typer.Exit(1 if found else 0)
    runs = ProtocolRuns(options, name, out)
    if action == "check":
        from refusion_eval.protocol.compare import check_table

        shown = check_table(runs.protocol, Path(runs.table_folder))
        rows = ([cell.text for cell in line.cells] for line in shown.lines)
        cli.show(shown, (shown.columns, rows), as_json=as_json)
        return
    with Interruption(lambda: SUITE_CONTINUES, finish_first=False):
        runs.run()
    runs.print_plan()
    raise typer.Exit(runs.status)
