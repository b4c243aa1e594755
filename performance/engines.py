"""Decodes real prompts with three engines on the same weights, in turns: this one, transformers' `generate`, llama.cpp.

    python performance/engines.py DATA --out engines.csv      # DATA: a folder with gsm8k/test.jsonl
    python performance/engines.py --table engines.csv         # the table of a former measurement

Every engine has a process of its own, which holds its model, and one of them computes at a time. Prompts are questions
of GSM8K in the model's chat template, long ones with solved questions in front. Decoding is greedy, for a fixed number
of tokens. llama.cpp is run by the package xllamacpp as docs/guides/servers.md says. It and this engine read the files
that `convert --to gguf` writes; of a model that is a GGUF file, llama.cpp also reads that file. llama.cpp writes no end
token here and the others go on after one, so tokens are compared up to the first. Where they differ, the table has the
lead of the first choice over the second, computed in float32.
"""

import csv
import json
import multiprocessing
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from command import run_script, show_progress

from refusion_eval.errors import ConfigError
from refusion_eval.loading import LoadedModel
from refusion_eval.models.card import checkpoint_card
from refusion_eval.models.device import copy_bandwidth, weight_bytes
from refusion_eval.models.packaged import MODELS, packaged_file
from refusion_eval.runs.hardware import collect_hardware
from refusion_eval.training.checkpoints.to_gguf import convert

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
OWN, STOCK, LLAMA = "this engine", "transformers", "llama.cpp"
MEASURED = tuple((OWN, kind) for kind in DTYPES)
MEASURED += ((STOCK, "F32"), (STOCK, "BF16"), *((LLAMA, kind) for kind in DTYPES), (LLAMA, "file"))


class Answer(NamedTuple):
    tokens: list[int]
    prefill_seconds: float  # until the first token
    decode_seconds: float  # for all others


Decode = Callable[[list[int], int], Answer]
# It imports nothing else, so that the memory of llama.cpp is counted alone.
LLAMA_SERVER = Path(__file__).resolve().parents[1] / "examples" / "serve_gguf.py"


class Loaded(NamedTuple):
    decode: Decode
    process: int  # whose memory is that of the engine


def own_engine(path: str, positions: int) -> Loaded:
    from refusion_eval import api
    from refusion_eval.decoders import DECODERS

    model, decoder = api.load_model(path, device="cpu"), DECODERS["autoregressive"]

    def decode(prompt: list[int], number: int) -> Answer:
        done = model.engine.run(decoder.decode, prompt, decoder.Settings(gen_length=number))
        assert done.prefill_seconds is not None
        return Answer(list(done.tokens), done.prefill_seconds, done.seconds - done.prefill_seconds)

    return Loaded(decode, os.getpid())


def stock_engine(path: str, positions: int) -> Loaded:
    from transformers import AutoModelForCausalLM

    folder, _, dtype = path.rpartition("@")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id = None

    class Clock:  # transformers hands it the prompt, then each token
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, _: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def decode(prompt: list[int], number: int) -> Answer:
        clock, start = Clock(), time.perf_counter()
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": number, "pad_token_id": 0, "streamer": clock}
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]
        return Answer(made.tolist(), clock.times[1] - start, clock.times[-1] - clock.times[1])

    return Loaded(decode, os.getpid())


def llama_engine(path: str, positions: int) -> Loaded:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, str(LLAMA_SERVER), path, "--float32-cache", "--port", str(port)]
    words += ["--threads", str(torch.get_num_threads()), "--context", str(positions)]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline()  # its address, once it is there

    def decode(prompt: list[int], number: int) -> Answer:
        asked: dict[str, Any] = {"prompt": prompt, "n_predict": number, "temperature": 0, "ignore_eos": True}
        asked |= {"cache_prompt": False, "return_tokens": True, "samplers": ["temperature"]}
        body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", body, kind)
        with urllib.request.urlopen(request, timeout=600) as answer:
            told = json.load(answer)
        times = told["timings"]
        assert times["prompt_n"] == len(prompt)
        # The first token belongs to the prompt, as in the other engines.
        return Answer(told["tokens"], times["prompt_ms"] / 1000, times["predicted_ms"] / 1000)

    return Loaded(decode, server.pid)


ENGINES = {OWN: own_engine, STOCK: stock_engine, LLAMA: llama_engine}


def memory(process: int, name: str) -> int:
    """Memory of a process in MB: VmRSS for what it has, VmHWM for the most that it had."""
    with open(f"/proc/{process}/status") as lines:
        return next(int(line.split()[1]) * 1024 // 10**6 for line in lines if line.startswith(name))


def serve(engine: str, path: str, num_threads: int, positions: int, pipe: Connection) -> None:
    """What the process of an engine does: it loads the model, then answers one prompt after the other."""
    torch.set_num_threads(num_threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that a server ends, too
    decode, process = ENGINES[engine](path, positions)
    try:
        decode([1, 2, 3, 4], 4)
        pipe.send(memory(process, "VmRSS"))
        while (asked := pipe.recv()) is not None:
            pipe.send((decode(*asked), memory(process, "VmHWM")))
    finally:
        if process != os.getpid():
            os.kill(process, signal.SIGTERM)


def prompts_of(model: LoadedModel, data: Path, length: int, number: int) -> list[list[int]]:
    """Rendered prompts of about so many tokens."""
    path = data / "gsm8k" / "test.jsonl"
    if not path.is_file():
        raise ConfigError(f"{path} is missing; name the folder with gsm8k/test.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def rendered(shown: Sequence[dict[str, str]], asked: dict[str, str]) -> list[int]:
        solved = [f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in shown]
        text = model.tokenizer.render_chat([{"role": "user", "content": "".join(solved) + asked["question"]}])
        return model.tokenizer.encode(text)

    short = sorted((rendered((), row) for row in rows[:200]), key=lambda prompt: abs(len(prompt) - length))
    if len(short[0]) > 0.8 * length:
        return short[:number]
    prompts = []
    for index in range(number):
        shown: list[dict[str, str]] = []
        prompt = longer = rendered((), rows[index])
        while len(longer) <= length:
            prompt, shown = longer, [*shown, rows[200 + 40 * index + len(shown)]]
            longer = rendered(shown, rows[index])
        prompts.append(prompt)
    return prompts


class Margins:
    """The lead of the first choice over the second after a text, as transformers computes it in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def after(self, tokens: Sequence[int]) -> float:
        first, second = self._model(torch.tensor([list(tokens)]), logits_to_keep=1).logits[0, -1].topk(2).values
        return float(first - second)


def first_difference(ours: Sequence[int], others: Sequence[int], ends: Sequence[int]) -> int | None:
    """Where two answers differ before the first end token; None if they do not."""
    for index, pair in enumerate(zip(ours, others, strict=True)):
        if pair[0] in ends or pair[1] in ends:
            return None
        if pair[0] != pair[1]:
            return index
    return None


def measure(
    model: LoadedModel, name: str, data: Path, chosen: Sequence[tuple[str, str]], lengths: Sequence[int], number: int,
    items: int, threads: Sequence[int], folder: Path,
) -> Iterator[list[dict[str, Any]]]:  # fmt: skip
    """Rows of one turn after the other, in which every engine has decoded one prompt."""
    paths: dict[tuple[str, str], str] = {}
    for engine, kind in chosen:
        if engine == STOCK:
            paths[engine, kind] = f"{model.directory}@{DTYPES[kind]}"
        elif kind == "file":
            paths[engine, kind] = str(packaged_file(name) if name in MODELS else name)
        else:
            file = folder / f"{kind}.gguf"
            if not file.exists():
                convert(name if Path(name).is_dir() else str(model.directory), file, dtype=DTYPES[kind])
            paths[engine, kind] = str(file)
    prompts = [(length, index, prompt) for length in lengths for index, prompt in
               enumerate(prompts_of(model, data, length, items))]  # fmt: skip
    positions = max(len(prompt) for _, _, prompt in prompts) + number  # those that llama.cpp's cache has to hold
    hardware, margins = collect_hardware(1), Margins(model.directory)
    ends = {*checkpoint_card(model.name, model.directory).eos_ids, *model.tokenizer.inner.all_special_ids}
    conditions = {"model": model.card.name, "cpu": hardware.cpu, "cores": hardware.cores}
    conditions["python"] = platform.python_version()
    conditions |= {package: version(package) for package in ("refusion_eval", "torch", "transformers", "xllamacpp")}
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        bandwidth = copy_bandwidth(torch.device("cpu"))
        spawned, loaded = multiprocessing.get_context("spawn"), {}
        for key in chosen:
            show_progress(f"{num_threads} threads: loading {' '.join(key)}")
            ours, theirs = spawned.Pipe()
            arguments = (key[0], paths[key], num_threads, positions, theirs)
            process = spawned.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that the end of the process ends a wait for it
            loaded[key] = (process, ours, ours.recv())
        for turn, (length, item, prompt) in enumerate(prompts):
            rows: list[dict[str, Any]] = []
            reference: list[int] | None = None
            # Another engine begins in every turn.
            for key in (*chosen[turn % len(chosen) :], *chosen[: turn % len(chosen)]):
                loaded[key][1].send((prompt, number))
                answer, peak = loaded[key][1].recv()
                size = 4 if key[1] == "F32" else 2
                num_bytes = weight_bytes(model.config, torch.float32) * size // 4
                num_bytes = os.path.getsize(paths[key]) if key[1] == "file" else num_bytes
                rows.append(
                    {"engine": key[0], "weights": key[1], "threads": num_threads, "length": length, "item": item}
                    | {"prompt_tokens": len(prompt), "tokens": len(answer.tokens), "weight_bytes": num_bytes}
                    | {"prefill_seconds": round(answer.prefill_seconds, 4)}
                    | {"decode_seconds": round(answer.decode_seconds, 4), "loaded_mb": loaded[key][2], "peak_mb": peak}
                    | {"copy_gb_per_second": round(bandwidth / 1e9, 2), "load": round(os.getloadavg()[0], 2)}
                    | {"ids": " ".join(map(str, answer.tokens)), **conditions}
                )
                show_progress(f"{num_threads} threads, prompt of {len(prompt)}: {' '.join(key)} "
                              f"{(len(answer.tokens) - 1) / answer.decode_seconds:.1f} tokens/s")  # fmt: skip
                if key == (OWN, "F32"):
                    reference = answer.tokens
            for row in rows:
                row["differs_at"] = row["margin"] = ""
                tokens = [int(token) for token in str(row["ids"]).split()]
                place = None if reference is None else first_difference(reference, tokens, sorted(ends))
                if reference is not None and place is not None:
                    row["differs_at"], row["margin"] = place, round(margins.after([*prompt, *reference[:place]]), 4)
            yield rows
        for process, pipe, _ in loaded.values():
            pipe.send(None)
            process.join()


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each engine, number of threads and length of the prompts; ratios are to this engine, same dtype."""
    names: tuple[str, ...] = (
        "Threads",
        "Prompt",
        "Engine",
        "Weights",
        "Tokens/s",
        "This engine is faster",
        "Prompt tokens/s",
    )
    names += ("Weights read, of a copy", "Peak MB", "Other tokens: item at token (lead)")
    lines = ["| " + " | ".join(names) + " |", "| --: | --: | :-- | :-- " + "| --: " * 5 + "| :-- |"]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((str(row["threads"]), str(row["length"]), row["engine"], row["weights"]), []).append(row)
    for (threads, length, engine, weights), group in groups.items():
        seconds = [float(row["decode_seconds"]) for row in group]
        prefill = sum(float(row["prefill_seconds"]) for row in group)
        rate = sum(int(row["tokens"]) - 1 for row in group) / sum(seconds)
        copied = group[0]["copy_gb_per_second"]  # empty where something disturbed its measurement
        read = f"{float(group[0]['weight_bytes']) * rate / 1e7 / float(copied):.0f} %" if copied else ""
        ratio = ""
        ours = groups.get((threads, length, OWN, "BF16" if weights == "file" else weights))
        if engine != OWN and ours:
            ratio = f"{sum(seconds) / sum(float(row['decode_seconds']) for row in ours):.2f}"
        differing = [row for row in group if row["margin"] != ""]
        other = [f"item {row['item']} at {row['differs_at']} ({float(row['margin']):.3f})" for row in differing]
        cells: tuple[str, ...] = (
            threads,
            f"{sum(int(row['prompt_tokens']) for row in group) / len(group):.0f}",
            engine,
            weights,
        )
        cells += (f"{rate:.1f}", ratio, f"{sum(int(row['prompt_tokens']) for row in group) / prefill:.0f}")
        cells += (read, str(max(int(row["peak_mb"]) for row in group)), ", ".join(other))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(
    data: Annotated[Path | None, typer.Argument(help="Folder with gsm8k/test.jsonl.")] = None,
    model: Annotated[str, typer.Option(help="Name of a packaged model, a folder or a GGUF file.")] = "smollm2",
    engines: Annotated[str, typer.Option(help="As this engine:F32,llama.cpp:F32; the default is all.")] = "",
    lengths: Annotated[str, typer.Option(help="About the tokens of the prompts.")] = "60,500,1500",
    tokens: Annotated[int, typer.Option(help="Tokens of each response.", min=2)] = 256,
    items: Annotated[int, typer.Option(help="Prompts of each length.", min=1)] = 2,
    threads: Annotated[str, typer.Option(help="Numbers of threads.")] = "1,2",
    out: Annotated[Path | None, typer.Option(help="CSV file: a line for each response.")] = None,
    table: Annotated[Path | None, typer.Option(help="Print the table of this CSV file, and measure nothing.")] = None,
) -> None:
    """Measures the engines in turns and prints the table."""
    if table is not None:
        with table.open(encoding="utf-8", newline="") as file:
            print(table_of(list(csv.DictReader(file))))
        return
    if data is None:
        raise ConfigError("name the folder with gsm8k/test.jsonl, or --table FILE.csv")
    named = (name.partition(":") for name in engines.split(","))
    chosen = tuple((engine, kind) for engine, _, kind in named) if engines else MEASURED
    if unknown := [":".join(key) for key in chosen if key not in MEASURED]:
        raise ConfigError(f"engines: {', '.join(unknown)} unknown; choose of {', '.join(map(':'.join, MEASURED))}")
    opened = LoadedModel.open(model, device="cpu")
    numbers = [[int(number) for number in text.split(",")] for text in (lengths, threads)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in measure(opened, model, data, chosen, numbers[0], tokens, items, numbers[1], Path(folder)):
            rows += turn
            if out is not None:
                with out.open("w", encoding="utf-8", newline="") as file:
                    writer = csv.DictWriter(file, list(rows[0]))
                    writer.writeheader()
                    writer.writerows(rows)
    print(table_of(rows))


if __name__ == "__main__":
    run_script(main)
