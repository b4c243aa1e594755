"""Which processes decode: this one, those that its launcher started beside it, or workers on a Ray cluster."""

from collections.abc import Callable, Mapping

from refusion_eval.errors import ConfigError
from refusion_eval.runs.likelihood import LocalScorer, Scorer
from refusion_eval.runs.manifest import build_manifest
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.runs.runner import JobRunner
from refusion_eval.runs.system import System
from refusion_eval.scaleout.driver import Register
from refusion_eval.scaleout.launch import process_group
from refusion_eval.scaleout.ray_judge import RayJudge
from refusion_eval.scaleout.ray_runner import RayRunner, on_driver
from refusion_eval.scaleout.torchrun import TorchrunRunner
from refusion_eval.scoring.judge import Judge
from refusion_eval.store.manifest import Manifest


def driver_args(args: ModelArgs) -> ModelArgs:
    """What this process opens itself: less than was asked for where only others decode."""
    return on_driver(args) if args.engine == "ray" else args


def describe_run(runner: JobRunner, system: System, task_versions: Mapping[str, str]) -> Manifest:
    """The manifest of a run: as this process sees it, or as its first worker does where only others decode.

    Args:
        runner: what decodes.
        system: what this process has opened.
        task_versions: task name -> version, as far as known.
    """
    return runner.manifest(task_versions) if isinstance(runner, RayRunner) else build_manifest(system, task_versions)


def device_facts(runner: JobRunner, system: System) -> dict[str, str]:
    """What decodes, for lm-eval's results: `model_dtype`, `model_device`, `model_attention`."""
    if isinstance(runner, RayRunner):
        seen = runner.manifest({})
        facts = (f"torch.{seen.dtype}", seen.device, seen.attention)
    else:
        model = system.model
        facts = (str(model.dtype), str(model.device), model.attention)
    return dict(zip(("model_dtype", "model_device", "model_attention"), facts, strict=True))


def choose_runner(args: ModelArgs, system: System, register: Register) -> JobRunner:
    """What decodes the jobs of this process' run.

    Args:
        args: what was asked for.
        system: what is run.
        register: records a process that generates samples, and names it.
    """
    if args.engine == "ray":
        return RayRunner(args, system, register)
    launched = process_group()
    return system.decoder if launched is None else TorchrunRunner(launched, system, register)


def choose_scorer(args: ModelArgs, system: System, runner: Callable[[], JobRunner]) -> Scorer:
    """What computes log-likelihoods.

    Args:
        args: what was asked for.
        system: what is run.
        runner: gives what decodes the jobs of this run.

    Raises:
        ConfigError: this process has no model, and what has one does not compute them.
    """
    if args.engine == "ray":
        raise ConfigError(
            "log-likelihoods are not computed on Ray: leave out engine=ray for such tasks, or start the processes with "
            "torchrun or accelerate launch"
        )
    chosen = runner()
    return chosen if isinstance(chosen, TorchrunRunner) else LocalScorer(system)


def choose_judge(runner: JobRunner, *, sandbox: str, deferred: bool) -> Judge:
    """What judges texts while the runner decodes: processors of the Ray cluster, or threads of this process.

    Args:
        runner: what decodes the jobs of this run.
        sandbox: "auto", or "none" for no isolation.
        deferred: whether programs wait until decoding pauses; not on a cluster, which has processors for them.
    """
    if isinstance(runner, RayRunner):
        return RayJudge(runner.cluster, sandbox=sandbox)
    return Judge(sandbox=sandbox, deferred=deferred)
