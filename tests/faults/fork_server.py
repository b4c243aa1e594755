"""Runs of the command line in forked processes: `python -m tests.faults.fork_server`, one JSON object a line.

A run takes seconds to import its libraries and much less to decode a few short items. Here they are imported, the
small checkpoint is opened and its prompts are written once; each run is a process of its own from there on, with its
own kill, limits and signals.
"""

import contextlib
import functools
import json
import logging
import os
import resource
import signal
import sys
import tempfile
import time
import traceback

from refusion_eval import api
from refusion_eval.cli import evaluate  # noqa: F401 - imported here so that no run has to
from refusion_eval.cli import main as command_line
from refusion_eval.evaluation.tasks import find_tasks
from refusion_eval.models import tokenizer
from refusion_eval.paths import embedded_path
from refusion_eval.results import facts, measured, tables  # noqa: F401
from refusion_eval.runs import own_engine
from refusion_eval.sandbox import probe
from tests.faults import places, runs


def serve():
    """Answers requests until there are no more: {"start": ...} with a pid, {"poll": pid} with its status or null."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _prepare()
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if pid == 0:
                _run(request["start"])
            print(json.dumps(pid), file=answers)
        elif "warm" in request:
            _warm(request["warm"])
            print("null", file=answers)
        else:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), file=answers)


def _prepare():
    """Does once what all runs would do alike."""
    probe()
    for task in find_tasks(["mini_gsm8k", "mini_mbpp"]):
        task.items(None)
    # A class method of a frozen class cannot be cached in place without losing its class, so the function is.
    api.LoadedModel.open = functools.cache(api.LoadedModel.open)
    own_engine.copy_bandwidth = lambda device: 1e10
    api.LoadedModel.open(
        str(embedded_path("refusion")),
        dtype="auto",
        device="auto",
        attention="auto",
        revision=None,
        kv_budget_gib=None,
        cuda_graphs=False,
        adapter=None,
    )
    _remember_prompts()
    with tempfile.TemporaryDirectory() as folder:
        _warm([runs.command(f"{folder}/run")])


def _remember_prompts():
    """Keeps each rendered prompt, because the process that renders them takes longer to start than a run to decode."""
    render, known = tokenizer.render_chat, {}

    def remembered(inner, messages, template=None, **arguments):
        question = json.dumps([messages, template or inner.get_chat_template(), arguments], sort_keys=True)
        if question not in known:
            known[question] = render(inner, messages, template, **arguments)
        return known[question]

    tokenizer.render_chat = remembered


def _warm(commands):
    """Runs commands here, so that forked processes need not import what they need."""
    for command in commands:
        with contextlib.suppress(SystemExit):
            _command(command)


def _command(words):
    """Runs a command as if it were the first of the process."""
    logging.getLogger("refusion_eval").handlers = []  # each command adds its own
    sys.argv = ["refusion-eval", *words]
    command_line()


def _one_after_another(commands, log):
    """Status, output, seconds of processor time and MiB beyond what was there before of each command."""
    results, before = {}, _peak()
    for name, command in commands.items():
        os.ftruncate(log, 0)
        began = time.process_time()
        try:
            _command(command)
            status = 0
        except SystemExit as ended:
            status = ended.code
        except Exception:  # noqa: BLE001 - the output tells what a user would have seen
            traceback.print_exc()
            status = 70
        sys.stdout.flush()
        sys.stderr.flush()
        spent = {"seconds": time.process_time() - began, "mib": _peak() - before}
        results[name] = {"status": status, "output": os.pread(log, 1 << 20, 0).decode(errors="replace"), **spent}
    return results


def _peak():
    """The largest memory that this process ever had, in MiB."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def _run(wanted):
    """The whole life of a forked process."""
    status = 70
    try:
        log = os.open(wanted["log"], os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(wanted.get("environment", {}))
        os.chdir(wanted.get("cwd", "."))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        watched = places.Places(wanted.get("fault", {}))
        watched.watch()
        if "acknowledged" in wanted:
            places.acknowledge(wanted["acknowledged"])
        for name, options in wanted.get("trouble", {}).items():
            getattr(places, name)(**options)
        if "largest_file" in wanted:
            # Past the limit a write fails as on a full disk, once the signal that comes with it is ignored.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (wanted["largest_file"], resource.RLIM_INFINITY))
        if "uid" in wanted:
            os.setgroups([])
            os.setresgid(*[wanted["uid"]] * 3)
            os.setresuid(*[wanted["uid"]] * 3)
        sys.argv = ["refusion-eval", *wanted["command"]]
        signal.alarm(wanted.get("longest", 0))
        try:
            if "commands" in wanted:
                results = _one_after_another(wanted["commands"], log)
                with open(wanted["results"], "w") as file:
                    json.dump(results, file)
            else:
                command_line()
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        if "counts" in wanted:
            with open(wanted["counts"], "w") as file:
                json.dump(watched.passed, file)
    except BaseException:  # noqa: BLE001 - a process that was forked must not go on as its parent does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
