"""Training runs in processes of their own, as torchrun would start them, and ways to kill them."""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

Death = tuple[Literal["training", "saving"], int]  # killed in the middle of this, at this step

# Its processes are copies of one that has imported everything and computed nothing.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["refusion_eval.training.run", "tests.training.runs"])


def train(
    run_dir: Path,
    *settings: str,
    num_processes: int = 1,
    death: Death | None = None,
    module: str = "refusion_eval.training.run",
) -> list[int]:
    """Runs the configuration "tiny" with some changes.

    Args:
        run_dir: of the run; beside it are the token cache and `<run_dir>.err`, what the processes said.
        settings: "section.key=value".
        num_processes: of the run.
        death: when the first process is killed.
        module: what is run, with the command line of `refusion_eval.training.run`.

    Returns:
        The exit code of each process.
    """
    arguments = ["--config", "tiny", "--set", f"data.cache_dir={run_dir.parent / 'tokens'}"]
    arguments += ["--set", f"output.run_dir={run_dir}"]
    for setting in settings:
        arguments += ["--set", setting]
    said = run_dir.with_suffix(".err")
    said.unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(num_processes):
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "MASTER_PORT": port}
        process = _CONTEXT.Process(target=_run, args=(arguments, environment, said, None if rank else death, module))
        process.start()
        processes.append(process)
    processes[0].join(300)
    if processes[0].exitcode:
        for process in processes[1:]:  # as torchrun does when one fails
            process.kill()
    for process in processes:
        process.join(60)
        assert process.exitcode is not None, "a process hangs"
    return [process.exitcode for process in processes]


def _run(arguments: Sequence[str], environment: dict[str, Any], said: Path, death: Death | None, module: str) -> None:
    from refusion_eval.training.trainer import RefusionTrainer

    multiprocessing.set_start_method("fork", force=True)  # as it is where a run is started: for data-loader workers
    with said.open("a") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    os.environ |= {name: str(value) for name, value in environment.items()} | {"MASTER_ADDR": "127.0.0.1"}

    def die_in(method: str, step: int) -> None:
        original = getattr(RefusionTrainer, method)

        def dying(trainer: RefusionTrainer, *args: Any, **kwargs: Any) -> Any:
            if trainer.state.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(trainer, *args, **kwargs)

        setattr(RefusionTrainer, method, dying)

    if death is not None:
        die_in({"training": "compute_loss", "saving": "_save_rng_state"}[death[0]], death[1])
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")
