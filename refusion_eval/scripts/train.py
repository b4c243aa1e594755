"""Starts a training: one process for each GPU, on one machine or several (train.sh, `refusion-eval train`)."""

import os
import subprocess
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from refusion_eval.scripts.steps import Parser, Steps, whole_number

DESCRIPTION = """Trains a model. Run again to continue an interrupted run. On several machines run it on each, with the
same options but -r."""
DEFAULT_PORT = "29500"


def main(arguments: Sequence[str]) -> int:
    """Checks the options, then the settings and files, and trains; returns the exit status.

    Raises:
        SystemExit: an option is wrong (status 2), or a signal arrived.
    """
    parser = train_parser(arguments)
    given = parser.read()
    num_nodes = int(given.n)
    if not given.config and not (parser.script and given.setup):
        parser.error("--config is missing")
    if num_nodes > 1 and not (given.r and given.m):
        parser.error(f"-n {num_nodes} needs -r RANK and -m MASTER on every machine")
    if num_nodes > 1 and int(given.r) >= num_nodes:
        parser.error(f"-r is '{given.r}', with -n {num_nodes} it goes from 0 to {num_nodes - 1}")
    if num_nodes == 1 and int(given.r or 0):
        parser.error(f"-r is '{given.r}', and there is one machine only; give -n")
    return 0 if parser.checks_only else _train(given, parser)


def train_parser(arguments: Sequence[str]) -> Parser:
    """Returns the parser of the training's options."""
    parser = Parser(arguments, "train", DESCRIPTION)
    add, positive = parser.add_argument, whole_number("of at least 1", 1)
    add(
        "--config",
        metavar="C",
        type=parser.text,
        help="a YAML file, or a configuration of the package by name: tiny, refusion_8b, refusion_qwen25_7b, "
        "controlled_refusion, controlled_sft, controlled_llada, controlled_bd3lm",
    )
    add(
        "--set",
        metavar="S.K=VALUE",
        type=_setting,
        action="append",
        default=[],
        help="change a setting, for example data.files=train.jsonl or optimisation.lr=1e-5; may be repeated",
    )
    add("-n", metavar="NODES", type=positive, default="1", help="number of machines (default: 1)")
    add("-r", metavar="RANK", type=whole_number("of at least 0", 0), help="number of this machine, from 0")
    add("-m", metavar="MASTER[:PORT]", type=parser.text, help="machine 0, as the others reach it (default port: 29500)")
    processes = "processes on this machine (default: one for each NVIDIA GPU, or one)"
    add("--gpus", metavar="N", type=positive, dest="processes", help=processes)
    add("--processes", metavar="N", type=positive, help="the same as --gpus")
    add("--check", action="store_true", help="check the settings and files, and stop")
    if parser.script:
        add("--deepspeed", action="store_true", help="install DeepSpeed too, which parallelism=zero2 needs")
    return parser


def _setting(text: str) -> str:
    if text.find("=") < 1:
        raise ArgumentTypeError(f" is '{text}', write section.key=value")
    return text


def _train(given: Namespace, parser: Parser) -> int:
    num_nodes = int(given.n)
    python = str(Path.cwd() / parser.python)
    processes = int(given.processes or _num_gpus(python) or 1)
    overrides = [word for setting in given.set for word in ("--set", setting)]
    training = ("refusion_eval.training.run", "--config", given.config, *overrides)
    steps = Steps(dry_run=given.dry_run)
    os.chdir(parser.here)
    # A check before the start prints an error once, and outside torchrun's report of failed processes.
    status = steps.run(python, "-m", *training, "--check", str(num_nodes * processes))
    if status or given.check:
        return status
    where = ["--standalone"]
    if num_nodes > 1:
        host, _, port = given.m.rpartition(":") if ":" in given.m else (given.m, "", "")
        where = ["--nnodes", str(num_nodes), "--node-rank", given.r, "--master-addr", host]
        where += ["--master-port", port or DEFAULT_PORT]
    # Each process gets its share of the machine's cores; torchrun would give it one.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    torchrun = ("-m", "torch.distributed.run", *where, "--nproc-per-node", str(processes))
    return steps.run(python, *torchrun, "-m", *training)


def _num_gpus(python: str) -> int:
    """Counts the GPUs that torch may use, which CUDA_VISIBLE_DEVICES can limit; 0 before torch is installed."""
    command = [python, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return 0
    return int(printed) if printed.isdigit() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
