"""Runs on a Ray cluster of one machine: the same records as one process, whatever happens to the workers."""

import contextlib
import os
import re
import shutil
import signal
import sys
from collections import Counter

import pytest

from refusion_eval import api
from refusion_eval.errors import ConfigError, ScaleOutError
from refusion_eval.evaluation.loop import evaluate
from refusion_eval.lm_eval_plugin.adapter import RefusionLM
from refusion_eval.runs.job import Job
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.system import System
from refusion_eval.runs.terminal import StoppableIterator
from refusion_eval.scaleout import messages, ray_runner
from refusion_eval.scaleout.ray_runner import RayRunner, driver_args
from refusion_eval.store.records import SampleKey
from refusion_eval.store.run_store import RunReader
from tests.scaleout.ray_clusters import cluster, ray_here, started

__all__ = ["cluster"]

# The last two are given because every process measures its own, and forwards are fused by them.
SHORT = {"gen_length": 16, "slot_size": 4, "block_size": 8, "warmup": 0, "free_rows": 2, "row_cost": 0.1}
MOST_JOBS = 20_000


def arguments(checkpoint, **more):
    return parse_model_args({"pretrained": checkpoint, **SHORT, **more})


def recorded(run_dir):
    """Facts and scores that must not depend on the process that decoded a sample, and the ids of these processes."""
    with RunReader.open(run_dir) as run:
        samples = list(run.samples())
        scores = sorted(
            (score.key.digest(), score.metric, score.value, score.verdict, score.reason) for score in run.scores()
        )
    names = ("text", "tokens", "num_tokens", "num_forwards", "stop", "settings", "settings_source", "trace", "warm")
    facts = {sample.key: [getattr(sample, name) for name in (*names, "prompt_num_tokens")] for sample in samples}
    return facts, scores, {sample.process_id for sample in samples}


def test_records_and_verdicts_are_those_of_one_process(cluster, checkpoint, tmp_path):
    how = {"batch_size": 2, "tps_samples": 1}
    results = {}
    for engine, more in {"local": {}, "ray": {"workers": 2}}.items():
        args = arguments(checkpoint, run_dir=str(tmp_path / engine), engine=engine, **how, **more)
        outcome = evaluate(args, ["mini_gsm8k", "mini_mbpp"], limit=4)
        assert outcome.is_complete
        results[engine] = recorded(tmp_path / engine)
    assert len(results["local"][0]) == 8
    assert len(results["local"][1]) == 12
    assert results["ray"][:2] == results["local"][:2]
    with RunReader.open(tmp_path / "local") as local, RunReader.open(tmp_path / "ray") as ray:
        assert ray.run.manifest.fingerprint() == local.run.manifest.fingerprint()
        driver = next(iter(ray.run.processes))
    assert driver not in results["ray"][2], "the driver decodes nothing itself"


class Run:
    """A run of invented requests without a fixed number; the process id of a sample is the process number."""

    def __init__(self, args, **more):
        self.system = System(driver_args(args))
        self.runner = RayRunner(args, self.system, lambda hardware, pid: str(pid), **more)
        self.resolved = self.system.resolve("mini_gsm8k", {}, announce=False)
        self.asked = []
        self.enough = False

    def job(self, number, name=None):
        key = SampleKey("mini_gsm8k", "1.0", f"{number:032x}", "0" * 32, 0, self.resolved.digest)
        prompt = self.system.model.tokenizer.inner.encode(f"What is {number} plus {number}?")
        self.asked.append(name or str(number))
        return Job(key=key, benchmark="gsm8k", item_id=self.asked[-1], prompt_ids=prompt, resolved=self.resolved)

    def endless(self):
        number = 0
        while not self.enough:
            assert number < MOST_JOBS, "the condition of the test does not come true"
            yield self.job(number)
            number += 1


def test_requests_of_a_killed_worker_are_decoded_by_others_and_it_is_replaced(cluster, checkpoint, caplog):
    run = Run(arguments(checkpoint, engine="ray", workers=2, batch_size=2))
    samples, processes, killed = Counter(), set(), None
    for sample in run.runner.run(run.endless()):
        assert sample.error is None
        samples[sample.item_id] += 1
        processes.add(sample.process_id)
        if killed is None and len(processes) == 2:
            killed = sample.process_id
            os.kill(int(killed), signal.SIGKILL)
        run.enough = len(processes) == 3
    assert samples == Counter(run.asked), "each request has one record"
    (line,) = [line for line in caplog.messages if "is lost" in line]
    assert int(re.search(r"others decode its (\d+) requests", line)[1]) >= 1


def first_time(path):
    """Whether no process has called this with the path before."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def test_a_worker_that_dies_while_the_width_curve_is_measured_is_replaced(
    cluster, checkpoint, caplog, monkeypatch, tmp_path
):
    from ray import cloudpickle

    from refusion_eval.scaleout import ray_worker

    class DiesOnce(ray_worker.RayWorker):
        def width_cost(self):
            if first_time(died):
                os.kill(os.getpid(), signal.SIGKILL)
            return ray_worker.RayWorker.width_cost(self)

    died = tmp_path / "died"
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(ray_worker, "RayWorker", DiesOnce)
    for name in ("free_rows", "row_cost"):
        monkeypatch.delitem(SHORT, name)
    monkeypatch.setitem(SHORT, "fuse", True)  # only fused forwards need what rows cost
    run = Run(arguments(checkpoint, engine="ray", workers=1))
    assert api.needs_width_cost(run.resolved.settings)
    samples = list(run.runner.run(iter([run.job(number) for number in range(2)])))
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert [sample.error for sample in samples] == [None, None]
    (line,) = [line for line in caplog.messages if "is lost" in line]
    assert line.startswith("worker 1 ")
    assert len(line) < 300


def test_a_worker_that_hangs_does_not_keep_a_run_that_a_signal_ended(cluster, checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(messages, "STOP_SECONDS", 4.0)
    run = Run(arguments(checkpoint, engine="ray", workers=1, batch_size=2))
    stopped: list[int] = []
    try:
        for sample in run.runner.run(StoppableIterator(run.endless(), lambda: bool(stopped))):
            if not stopped:
                stopped.append(int(sample.process_id))
                os.kill(stopped[0], signal.SIGSTOP)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped[0], signal.SIGKILL)
    (line,) = [line for line in caplog.messages if line.startswith("records are missing")]
    assert re.search(r"worker 1 on .* is decoding \(\d+ requests\)", line)


def test_a_machine_that_joins_late_gets_its_share(cluster, checkpoint):
    run = Run(arguments(checkpoint, engine="ray", workers=3))
    samples, processes, late = Counter(), set(), None
    for sample in run.runner.run(run.endless()):
        samples[sample.item_id] += 1
        processes.add(sample.process_id)
        late = late or started(cluster, num_cpus=1)
        run.enough = len(processes) == 3
    cluster.remove_node(late)
    assert samples == Counter(run.asked)


def test_a_request_that_kills_every_worker_costs_only_itself(cluster, checkpoint, monkeypatch):
    from ray import cloudpickle

    from refusion_eval.scaleout import ray_worker

    class Fragile(ray_worker.RayWorker):
        def _jobs(self):
            for job in ray_worker.RayWorker._jobs(self):
                if job.item_id == "poison":
                    os.kill(os.getpid(), signal.SIGKILL)
                yield job

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(ray_worker, "RayWorker", Fragile)
    run = Run(arguments(checkpoint, engine="ray", workers=1, batch_size=2))
    jobs = [run.job(number, "poison" if number == 1 else None) for number in range(4)]
    errors = {sample.item_id: sample.error for sample in run.runner.run(iter(jobs))}
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert errors.keys() == {"0", "poison", "2", "3"}
    assert [name for name, error in errors.items() if error] == ["poison"]
    assert "3 workers ended while they decoded it" in errors["poison"]


def test_a_machine_without_the_checkpoint_is_named(cluster, checkpoint, tmp_path):
    folder = tmp_path / "only_on_the_driver"
    shutil.copytree(checkpoint, folder)
    run = Run(arguments(str(folder), engine="ray", workers=1))
    job = run.job(0)
    shutil.rmtree(folder)
    (node,) = {node.label for node in run.runner.cluster.nodes()}
    with pytest.raises(ScaleOutError, match=f"{re.escape(node)}: .*only_on_the_driver"):
        next(run.runner.run(iter([job])))


def test_a_worker_that_is_out_of_memory_once_is_replaced(cluster, checkpoint, monkeypatch, caplog, tmp_path):
    from ray import cloudpickle

    from refusion_eval.scaleout import ray_worker

    class Unlucky(ray_worker.RayWorker):
        def __init__(self, *arguments):
            if first_time(failed):
                raise RuntimeError("out of memory")
            ray_worker.RayWorker.__init__(self, *arguments)

    failed = tmp_path / "failed"
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(ray_worker, "RayWorker", Unlucky)
    run = Run(arguments(checkpoint, engine="ray", workers=1))
    (sample,) = run.runner.run(iter([run.job(0)]))
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert sample.error is None
    (line,) = [line for line in caplog.messages if "is lost" in line]
    assert line.endswith("RuntimeError: out of memory)")


def test_workers_that_stay_serve_the_next_run(cluster, checkpoint):
    run = Run(arguments(checkpoint, engine="ray", workers=1), keep_workers=True)
    first, second = ({sample.process_id for sample in run.runner.run(iter([run.job(number)]))} for number in range(2))
    run.runner.close()
    assert len(first) == 1
    assert first == second


def test_without_ray_one_sentence_names_the_extra(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    lm = RefusionLM(arguments(checkpoint, engine="ray"))
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[ray\]' in a checkout"):
        _ = lm.session.runner


@pytest.mark.parametrize("changes", [{"workers": 2}, {"worker_cpus": 2}, {"ray_address": "auto"}])
def test_arguments_of_ray_mean_nothing_to_another_engine(checkpoint, changes):
    with pytest.raises(ConfigError, match=f"{next(iter(changes))}=.* engine=ray"):
        arguments(checkpoint, **changes)


def test_one_gpu_cannot_be_named_for_many_workers(checkpoint):
    args = arguments(checkpoint, engine="ray", device="cuda:1")
    with pytest.raises(ConfigError, match="say cuda"):
        RayRunner(args, System(driver_args(args)), lambda hardware, pid: "")


def test_log_likelihoods_are_refused(checkpoint):
    lm = RefusionLM(arguments(checkpoint, engine="ray"))
    with pytest.raises(ConfigError, match="leave out engine=ray"):
        lm._loglikelihood_tokens([(None, [1], [2])])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError("raised in its creation task, say\nray::A()\nNoSuchModule: x"), "ValueError: NoSuchModule: x"),
        (ValueError(""), "ValueError: no reason given"),
    ],
)
def test_the_end_of_a_worker_is_described_in_one_line(error, words):
    assert ray_runner.in_short(error) == words


def test_a_cluster_that_is_not_there_is_named(monkeypatch):
    with ray_here():
        monkeypatch.setattr("ray.is_initialized", lambda: False)

    def refuse(**arguments):
        raise ConnectionError(f"cannot connect to {arguments['address']}")

    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(ScaleOutError, match=r"no Ray cluster at 10\.0\.0\.9:6379"):
        ray_runner.Cluster("10.0.0.9:6379")
