import importlib
import importlib.util
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from refusion_eval.cli import refuse_unused, wrong_options
from refusion_eval.cli.parameters import DryRun
from refusion_eval.errors import ConfigError
from refusion_eval.paths import embedded_name, embedded_path

MODULE = "refusion_eval.training.run"
DEFAULT_PORT = "29500"


def train(
    config: Annotated[
        str,
        typer.Option(
            metavar="C",
            help="A YAML file, or a configuration of the package by name: tiny, refusion_8b, refusion_qwen25_7b, "
            "controlled_refusion, controlled_sft, controlled_llada, controlled_bd3lm, smollm2_ar_sft, "
            "smollm2_refusion, smollm2_bd3lm, smollm2_llada, smollm2_idlm.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="S.K=VALUE",
            help="Change a setting, for example data.files=train.jsonl or optimisation.lr=1e-5. May be repeated.",
        ),
    ] = None,
    nodes: Annotated[int, typer.Option("-n", min=1, metavar="NODES", help="Number of machines.")] = 1,
    rank: Annotated[
        int | None, typer.Option("-r", min=0, metavar="RANK", help="Number of this machine, from 0.")
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            "-m",
            metavar="MASTER[:PORT]",
            help=f"Machine 0, as the others reach it. The default port is {DEFAULT_PORT}.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            "--processes",
            min=1,
            metavar="N",
            help="Processes on this machine. The default is one for each NVIDIA GPU, or one.",
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check the settings and files, and stop.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Train a model on one or several machines, as train.sh. Run it again to continue an interrupted run.

    On several machines run it on each, with the same options but -r.
    """
    if wrong := next((text for text in settings or [] if text.find("=") < 1), None):
        raise wrong_options("train", f"--set is '{wrong}', write section.key=value")
    if nodes > 1 and (rank is None or master is None):
        raise wrong_options("train", f"-n {nodes} needs -r RANK and -m MASTER on every machine")
    if rank is not None and rank >= nodes:
        raise wrong_options("train", f"-r is '{rank}', with -n {nodes} it goes from 0 to {nodes - 1}")
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError("training needs accelerate, which is not installed: pip install -e '.[train]' in a checkout")
    import torch  # loads slowly, so a wrong option is refused before

    processes = processes or torch.cuda.device_count() or 1
    training = ["--config", config, *(word for text in settings or [] for word in ("--set", text))]
    checking = [*training, "--check", str(nodes * processes)]
    print("+", shlex.join([sys.executable, "-m", MODULE, *checking]), flush=True)
    # A check before the start prints an error once, and outside torchrun's report of failed processes.
    if not dry_run and (status := importlib.import_module(MODULE).main(checking)):
        raise typer.Exit(status)
    if check:
        return
    where = ["--standalone"]
    if nodes > 1:
        host, _, port = str(master).rpartition(":") if ":" in str(master) else (master, "", "")
        where = ["--nnodes", str(nodes), "--node-rank", str(rank), "--master-addr", str(host)]
        where += ["--master-port", port or DEFAULT_PORT]
    # Each process gets its share of the machine's cores; torchrun would give it one.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    launching = [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", str(processes)]
    words = [*launching, "-m", MODULE, *training]
    print("+", shlex.join(words), flush=True)
    if not dry_run:
        os.execv(sys.executable, words)  # so that signals reach torchrun itself


def convert(
    source: Annotated[str, typer.Argument(help="Checkpoint folder or hub id, in either layout, or a GGUF file.")],
    target: Annotated[Path, typer.Argument(help="Folder (gguf: file) to write; it must not exist yet.")],
    to: Annotated[
        Literal["release", "stock", "gguf"] | None,
        typer.Option(
            help="Layout of the published ReFusion, or the backbone's, for any transformers; or a GGUF file of an "
            "autoregressive model, for llama.cpp."
        ),
    ] = None,
    from_: Annotated[
        Literal["gguf"] | None,
        typer.Option("--from", help="Write the model of a GGUF file as a folder in Hugging Face layout."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            help="Type of the weights. The default is SOURCE's; with --to gguf, and of quantised weights, float32."
        ),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Rows of the vocabulary, with --to stock. The default is the backbone's number.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
) -> None:
    """Write a checkpoint in another layout, as GGUF or from GGUF. The weights stay the same."""
    if (to is None) == (from_ is None):
        raise wrong_options("convert", "give one of --to LAYOUT and --from gguf")
    if from_ is not None:
        from refusion_eval.training.checkpoints import from_gguf

        refuse_unused("conversions --to a layout", rows=rows, revision=revision)
        from_gguf.convert(Path(source), target, dtype=dtype)
        print(f"{target}: {source} in Hugging Face layout")
        return
    if to == "gguf":
        from refusion_eval.training.checkpoints import to_gguf

        refuse_unused("--to stock", rows=rows)
        packaged = embedded_name(source, "autoregressive")
        place = source if packaged is None else str(embedded_path(packaged))
        to_gguf.convert(place, target, dtype=dtype, revision=revision)
        print(f"{target}: {source} as GGUF")
        return
    from refusion_eval.training.checkpoints import convert as conversion

    assert to is not None
    conversion.convert(source, target, to, dtype=dtype, rows=rows, revision=revision)
    print(f"{target}: {source} in the layout {to}")
