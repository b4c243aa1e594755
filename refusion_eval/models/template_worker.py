"""A child process that renders chat templates as transformers does; run as a script by `tokenizer`."""

# It reads JSON lines, the arguments of `render_jinja_template`, and writes {"text": ...} or {"error": ...}. A template
# is a program of whoever made the checkpoint: it can name nothing of Python, but it may loop for ever and ask for any
# memory. So the kernel bounds its processor time and memory. Nothing of this project is imported, for a quick start.

import json
import resource
import signal
import sys

from transformers.utils.chat_template_utils import render_jinja_template

# Real templates take a millisecond, and the process itself 50 MiB.
_SECONDS = 0.5
_MEMORY_BYTES = 192 << 20
# A text is at most this much longer than this many times the conversation. Longer ones would only keep the tokenizer
# busy.
_MOST_ADDED, _MOST_TIMES = 1 << 18, 8


def rendered(line: str) -> str:
    try:
        (text,), _ = render_jinja_template(**json.loads(line))
        if len(text) > _MOST_ADDED + _MOST_TIMES * len(line):
            raise ValueError(f"it makes {len(text)} characters of a conversation of {len(line)}")
        return json.dumps({"text": text})
    except Exception as error:  # noqa: BLE001 - whatever a stranger's program raises is an answer
        return json.dumps({"error": f"{type(error).__name__}: {str(error)[:500]}"})


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what happens at an interrupt
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        answer = rendered(line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
