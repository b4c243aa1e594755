import tempfile
from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli import EXIT_INCOMPLETE, say
from refusion_eval.errors import ConfigError


def gpu_check(
    out: Annotated[Path, typer.Option(help="Folder for checks.json, checks.md and roofline.png.")] = Path(
        "results/local/gpu"
    ),
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ...; cpu runs the checks at a small shape.")] = "cuda",
    shape: Annotated[str, typer.Option(help="Shape of the timed models: 8B (16 GB on the disk each) or 0.6B.")] = "8B",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of the mini tasks in each check.")] = 14,
    folder: Annotated[
        Path | None, typer.Option(help="Existing folder for temporary checkpoints; the default is the system's.")
    ] = None,
) -> None:
    """Check the GPU path on this machine. Speed, kernels and tokens each get a verdict."""
    import torch

    from refusion_eval.bench.checkpoints import SHAPES
    from refusion_eval.bench.gpu_check import GpuCheck
    from refusion_eval.bench.gpu_report import conditions, write_report

    on_cpu = device == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        raise ConfigError("gpu-check: torch sees no CUDA device here; --device cpu runs the checks at a small shape")
    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape} is unknown; choose {' or '.join(SHAPES)}")
    timed_shape = None if on_cpu else shape
    out.mkdir(parents=True, exist_ok=True)
    facts = conditions(torch.device(device), timed_shape)
    checks = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for check in GpuCheck(device, Path(scratch), timed_shape, prompts, say).run():
            checks.append(check)
            name, seconds, result = check
            print(f"{result.verdict:<8}  {name}: {result.text} ({seconds:.0f} s)", flush=True)
            write_report(out, facts, checks)
    print(f"{out}/checks.md")
    if any(check.result.passed is False for check in checks):
        raise typer.Exit(EXIT_INCOMPLETE)
