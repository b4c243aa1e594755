"""The process in which code of a checkpoint runs; run as a script by `stock_loop`.

It reads JSON lines: first which checkpoint and which loop, then a request in each. It answers each with a JSON line.
"""

import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from refusion_eval.models.checkpoint import read_json
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.runs.release import Entry, model_class
from refusion_eval.runs.stock_loop import PAD_ID, timed
from refusion_eval.types import Trace


class CodeLoop:
    """A model of a checkpoint's code, and its loop."""

    def __init__(self, directory: str, entry: dict[str, Any], dtype: str, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._entry = loop = Entry(**entry)
        auto: Any = getattr(transformers, model_class(read_json(Path(directory) / "config.json"))[0])
        options = {"dtype": getattr(torch, dtype), "local_files_only": True, "use_safetensors": True}
        self._model: Any = auto.from_pretrained(directory, trust_remote_code=True, **options).to(device).eval()
        if not loop.file:  # without defaults of the checkpoint, such as sampling, as in `StockLoop`
            self._model.generation_config = transformers.GenerationConfig()
        stem = loop.file.removesuffix(".py")
        self._function: Callable[..., Any] = (
            getattr(self._model, loop.name)
            if loop.is_method
            else get_class_from_dynamic_module(f"{stem}.{loop.name}", directory)  # which loads functions too
        )
        self._of_files = {"tokenizer": Tokenizer(Path(directory)).inner} if "tokenizer" in loop.takes else {}

    def answer(self, prompt: list[int], arguments: dict[str, Any], eos_ids: list[int], seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        entry = self._entry

        def loop(tokens: Tensor) -> Any:
            mask = {"attention_mask": torch.ones_like(tokens)}
            ends = {} if entry.file else {"eos_token_id": eos_ids or None, "pad_token_id": PAD_ID}
            given = arguments | self._of_files | ends | (mask if "attention_mask" in entry.takes else {})
            asked = {"input_ids": tokens, **mask} if entry.is_mapping else tokens
            model = () if entry.is_method else (self._model,)
            return (
                self._function(*model, **given, **{entry.prompt: asked})
                if entry.prompt
                else self._function(*model, asked, **given)
            )

        decoded = timed(loop, self._model, prompt, eos_ids, Trace())
        names = ("tokens", "stop", "seconds", "prefill_seconds")
        return {name: getattr(decoded, name) for name in names} | {"trace": decoded.trace.to_json()}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what happens at an interrupt
    # What the code prints is no answer, and what it reads is no question.
    answers, questions = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    loop = CodeLoop(**json.loads(questions.readline()))
    answer: dict[str, Any] = {}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        if not (line := questions.readline()):
            return
        try:
            answer = loop.answer(**json.loads(line))
        except Exception:  # noqa: BLE001 - whatever a stranger's code raises is an answer
            answer = {"error": traceback.format_exc()}


if __name__ == "__main__":
    main()
