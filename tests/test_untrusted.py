"""Files and texts of strangers: what is shown, opened and parsed, and what is not."""

import ast
import gc
import os
import sys
import threading
import time
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from refusion_eval import untrusted
from refusion_eval.errors import StoreError
from refusion_eval.untrusted import (
    DEEPEST,
    LARGEST,
    MOST_VALUES,
    Child,
    NoTimeError,
    environment_without_keys,
    open_plain,
    parse_json,
    parse_python,
    read_plain,
    visible,
)


@given(st.text())
@example("\x1b]0;title\x07 \x9b31m \u202e \u2066 \u2028 \ud800 \u200b \ufeff \U000e0041")
def test_shown_text_has_no_character_that_a_terminal_obeys(text):
    shown = visible(text)
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert not any(unicodedata.bidirectional(character) in ("RLO", "LRO", "RLE", "LRE", "RLI") for character in shown)
    shown.encode()


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs", "M"])))
def test_ordinary_text_is_shown_as_it_is(text):
    assert visible(text) == text


def test_an_error_is_one_line_without_effect():
    assert str(StoreError("a\n b\x1b[31m")) == "a b\\x1b[31m"


@pytest.mark.parametrize(
    "text", ["[" * DEEPEST + "]" * DEEPEST, '"' + "[" * 1000 + '"', '{"a": [NaN, 1e400, "\\ud800"]}']
)
def test_json_within_the_bounds_is_parsed(text):
    assert parse_json(text) is not None
    assert parse_json(text.encode()) is not None


@pytest.mark.parametrize(
    "text",
    [
        "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1),
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        "[1," * 70 + "2" + "]" * 70,
        "[" * 100_000,
        "[" + "0," * MOST_VALUES + "0]",
        " " * (LARGEST + 1),
        "9" * 5000,
        "",
        "{oops",
        b"\xff",
    ],
)
def test_json_beyond_the_bounds_is_one_kind_of_error(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the message is that of the parser or of the bound
        parse_json(text)


def test_a_pipe_a_folder_a_device_and_a_large_file_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", "/dev/zero", tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError, match=r"pipe|device|folder|No such file"):
            open_plain(path)
    with pytest.raises(OSError, match="larger than"):
        read_plain(tmp_path / "large")


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_plain(tmp_path / "link") == b"content"


SCRIPT = """
import json, os, signal, sys, time
for line in sys.stdin:
    word = json.loads(line)
    if word == "die":
        os._exit(3)
    if word == "use too much":
        os.kill(os.getpid(), signal.SIGPROF)
    if word == "wait":
        time.sleep(100)
    print(json.dumps([word, os.getpid()]), flush=True)
"""


def test_a_child_answers_again_after_each_death_and_a_forked_process_has_its_own(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    child = Child(tmp_path / "script.py", "begin")
    word, first = child.ask("a", 20)
    assert word == "a"
    assert child.ask("b", 20)[1] == first
    for lost in ("die", "use too much"):
        assert child.ask(lost, 20) is None
    assert child.ask("wait", 0.2) is None
    _, second = child.ask("c", 20)
    assert second != first
    pid = os.fork()
    if pid == 0:
        answer = child.ask("d", 20)
        child.close()
        os._exit(0 if answer[0] == "d" and answer[1] != second else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert child.ask("e", 20) == ["e", second]
    child.close()


def test_a_script_that_starts_slowly_is_started_once_more_and_is_no_missing_package(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("")
    lines = iter([None, b"1\n", b"2\n"])
    monkeypatch.setattr(Child, "_ask", lambda *given: next(lines))
    child = Child(tmp_path / "script.py", "begin")
    assert child.ask("a", 20) == 2
    child.close()
    lines = iter([None, None])
    with pytest.raises(TimeoutError, match=r"script\.py did not start within 180 s \(busy machine\), at 2 attempts"):
        child.ask("a", 20)


@pytest.mark.parametrize(
    ("script", "told"),
    [("raise SystemExit(3)", "status 3"), ("import no_such", "ModuleNotFoundError: No module named 'no_such'")],
)
def test_a_script_that_ends_at_its_start_is_an_error_that_says_what_it_wrote(script, told, tmp_path):
    (tmp_path / "script.py").write_text(script)
    with pytest.raises(ChildProcessError, match=rf"script\.py ended at its start \({told}\)"):
        Child(tmp_path / "script.py", "begin").ask("a", 20)


WORKER = """
import json, os, sys, threading, time
def work(seconds):
    while time.process_time() < begun + seconds:
        pass
for line in sys.stdin:
    begun = time.process_time()
    how, seconds = json.loads(line)
    if how == "asleep":
        time.sleep(seconds)
    elif how == "in a child":
        if not (pid := os.fork()):
            begun = time.process_time()
            work(seconds)
            os._exit(0)
        os.waitpid(pid, 0)
    else:
        thread = threading.Thread(target=work, args=(seconds,))
        thread.start()
        thread.join()
    print(json.dumps(how), flush=True)
"""


@pytest.mark.parametrize("how", ["in a thread", "in a child", "asleep"])
def test_a_child_has_its_own_time_and_no_more(how, tmp_path):
    (tmp_path / "script.py").write_text(WORKER)
    child = Child(tmp_path / "script.py", (how, 0))
    assert child.ask((how, 0.2), 1) == how
    assert 0.1 < child.seconds < 0.5
    assert child.ask((how, 100), 0.5) is None
    child.close()


def test_a_child_that_gets_no_time_is_asked_again_and_is_not_called_wrong(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(WORKER)
    child = Child(tmp_path / "script.py", ("asleep", 0))
    assert child.ask(("asleep", 0), 1) == "asleep"
    asked = []
    monkeypatch.setattr(
        untrusted, "longest_wall_s", lambda limit_s: asked.append(limit_s) or (0.2 if limit_s == 50 else 60)
    )
    with pytest.raises(NoTimeError, match=r"script\.py got too little time in 0 s \(busy machine\)"):
        child.ask(("asleep", 100), 50)
    assert asked.count(50) >= 2
    child.close()


ODD = """
import json, os, sys, time
for line in sys.stdin:
    how = json.loads(line)
    if how == "half a line":
        os.write(1, b'{"tokens": [1, ')
        time.sleep(100)
    if how == "in parts":
        os.write(1, b"[1, ")
        time.sleep(0.2)
        os.write(1, b"2]\\n")
        continue
    if how == "two lines":
        os.write(1, b"1\\n2\\n")
        continue
    if how == "leaves a process":
        if not os.fork():
            time.sleep(60)
            os._exit(0)
        os._exit(0)
    print(json.dumps(how), flush=True)
"""


def test_half_an_answer_is_none_in_time_and_a_process_that_is_left_behind_holds_nothing_up(tmp_path):
    (tmp_path / "script.py").write_text(ODD)
    child = Child(tmp_path / "script.py", "begin")
    assert child.ask("in parts", 20) == [1, 2]
    assert child.ask("two lines", 20) == 1
    begun = time.monotonic()
    assert child.ask("half a line", 0.5) is None
    assert child.ask("leaves a process", 20) is None
    assert time.monotonic() - begun < 60
    assert child.ask("again", 20) == "again"
    child.close()


def test_variables_with_names_of_keys_go_to_no_code_of_strangers(monkeypatch):
    secrets = ("NVIDIA_API_KEY", "HF_TOKEN", "CUDA_SECRET", "PYTORCH_PASSWORD", "OPENAI_API_KEY")
    for name in (*secrets, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "0")
    given = environment_without_keys()
    assert not given.keys() & set(secrets)
    assert given.keys() >= {"PATH", "CUDA_VISIBLE_DEVICES"}


class _Garbage:
    """A value in a circle, at whose end the collector runs Python code, so that another thread may take over."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        ast.dump(ast.Constant(1))


def test_programs_are_parsed_in_several_threads_at_once():
    # Where threads share the parser's count of depth (Python 3.11.7), each of these threads fails some ten times.
    program = "\n".join(f"def f{i}(x):\n    return [x + {i}, (x, {{'a': x}})]" for i in range(40))
    expected, found, end = ast.dump(ast.parse(program)), [], time.monotonic() + 2

    def parse(depth: int) -> None:
        if depth:
            return parse(depth - 1)
        while time.monotonic() < end:
            _Garbage()
            try:
                found.append(ast.dump(parse_python(program)) == expected)
            except (RecursionError, SystemError) as error:
                found.append(error)
        return None

    threads = [threading.Thread(target=parse, args=(7 * number,)) for number in range(3)]
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    try:
        sys.setswitchinterval(1e-6)
        gc.set_threshold(20)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
    assert found
    assert set(found) == {True}
