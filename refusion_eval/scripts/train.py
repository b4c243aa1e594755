"""Starts a training: one process for each GPU, on one machine or several (train.sh, `refusion-eval train`)."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from refusion_eval.scripts.steps import Caller, Options, Steps, read_caller, read_options, whole_number

USAGE = """Usage: {command} --config NAME_OR_PATH [options]

Run again to continue an interrupted run. On several machines run it on each, with the same options but -r.

  --config C         a YAML file, or a configuration of the package by name: tiny, refusion_8b, refusion_qwen25_7b,
                     controlled_refusion, controlled_sft, controlled_llada, controlled_bd3lm
  --set S.K=VALUE    change a setting, for example data.files=train.jsonl or optimisation.lr=1e-5; may be repeated
  -n NODES           number of machines (default: 1)
  -r RANK            number of this machine, from 0
  -m MASTER[:PORT]   machine 0, as the others reach it (default port: 29500)
  --gpus N, --processes N
                     processes on this machine (default: one for each NVIDIA GPU, or one)
{setup}  --check            check the settings and files, and stop
{setup_only}  --dry-run          print the commands instead of running them
  --help             this text
"""
DEEPSPEED_LINE = "  --deepspeed        install DeepSpeed too, which parallelism=zero2 needs\n"
SETUP_LINE = "  --setup            make the environment and stop\n"
ENVIRONMENT_LINE = """
Environment: PYTHON (python3), REFUSION_EVAL_VENV (.venv), REFUSION_EVAL_TORCH_INDEX (package index for torch).
"""
DEFAULT_PORT = "29500"

WITH_VALUE = ("--config", "-n", "-r", "-m", "--gpus", "--processes")
FLAGS = ("--deepspeed", "--check", "--setup", "--dry-run", "--help", "-h")


def main(arguments: Sequence[str]) -> int:
    """Checks the options, then the settings and files, and trains.

    Args:
        arguments: the options, after what a shell script put before them.

    Returns:
        The exit status of the check if it failed, else that of the training.

    Raises:
        SystemExit: an option is wrong (status 2), or a signal arrived.
    """
    caller, rest = read_caller(arguments, "train")
    options = read_options(rest, caller, with_value=WITH_VALUE, flags=FLAGS, repeatable=("--set",))
    if options.flags & {"--help", "-h"}:
        by_script = bool(caller.script)
        usage = USAGE.format(
            command=caller.command,
            setup=DEEPSPEED_LINE if by_script else "",
            setup_only=SETUP_LINE if by_script else "",
        )
        print(usage + (ENVIRONMENT_LINE if by_script else ""), end="")
        return 0
    _check(options, caller)
    if caller.checks_only or "--setup" in options.flags:
        return 0
    return _train(options, caller)


def _check(options: Options, caller: Caller) -> None:
    for _, value in options.repeated:
        if value.find("=") < 1:
            raise caller.fail(f"--set is '{value}', write section.key=value")
    values = options.values
    for option, low in (("-n", 1), ("-r", 0), ("--gpus", 1), ("--processes", 1)):
        if option in values:
            whole_number(option, values[option], low, caller)
    if "--config" not in values and "--setup" not in options.flags:
        raise caller.fail("--config is missing")
    num_nodes, rank = int(values.get("-n", "1")), values.get("-r")
    if num_nodes > 1:
        if rank is None or "-m" not in values:
            raise caller.fail(f"-n {num_nodes} needs -r RANK and -m MASTER on every machine")
        if int(rank) >= num_nodes:
            raise caller.fail(f"-r is '{rank}', with -n {num_nodes} it goes from 0 to {num_nodes - 1}")
    elif int(rank or 0):
        raise caller.fail(f"-r is '{rank}', and there is one machine only; give -n")


def _train(options: Options, caller: Caller) -> int:
    values = options.values
    num_nodes = int(values.get("-n", "1"))
    processes = int(values.get("--gpus") or values.get("--processes") or _num_gpus() or 1)
    overrides = [word for pair in options.repeated for word in pair]
    training = ("refusion_eval.training.run", "--config", values["--config"], *overrides)
    steps = Steps(dry_run="--dry-run" in options.flags)
    python = str(Path.cwd() / caller.python)
    os.chdir(caller.here)
    # A check of its own says an error once, and not within torchrun's report of failed processes.
    status = steps.run(python, "-m", *training, "--check", str(num_nodes * processes))
    if status or "--check" in options.flags:
        return status
    where = ["--standalone"]
    if num_nodes > 1:
        host, _, port = values["-m"].rpartition(":") if ":" in values["-m"] else (values["-m"], "", "")
        where = ["--nnodes", str(num_nodes), "--node-rank", values["-r"], "--master-addr", host]
        where += ["--master-port", port or DEFAULT_PORT]
    # A process' share of the machine's cores; torchrun would give each process one.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    torchrun = ("-m", "torch.distributed.run", *where, "--nproc-per-node", str(processes))
    return steps.run(python, *torchrun, "-m", *training)


def _num_gpus() -> int:
    """Counts the NVIDIA GPUs of this machine without torch, which may not be installed yet."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return 0
    return sum(line.startswith("GPU") for line in listed.splitlines())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
