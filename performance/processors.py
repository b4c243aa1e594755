"""Whether figures of the embedded family depend on the processor: the same items, computed as other processors would.

A variant is a processor with fewer vector instructions than this one: torch takes its kernels for that processor, numba
compiles for it, and MKL adds in its order. It is made of environment variables for a process of its own.
`.ci/processors` runs tests under the same variants.
"""

import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import torch
import typer
from command import run_script, show_progress

from refusion_eval import cli
from refusion_eval.errors import RefusionEvalError
from refusion_eval.store.run_store import RunReader

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "embedded" / "processors.csv"
OWN = "own"  # the variant of this processor, without a variable
# Torch's name of what an x86-64 processor can do, each more than the one before -> the variables of such a processor.
PROCESSORS = {
    "DEFAULT": "ATEN_CPU_CAPABILITY=default NUMBA_CPU_NAME=generic MKL_CBWR=COMPATIBLE",
    "AVX2": "ATEN_CPU_CAPABILITY=avx2 NUMBA_CPU_NAME=haswell MKL_CBWR=AVX2",
    "AVX512": "ATEN_CPU_CAPABILITY=avx512 NUMBA_CPU_NAME=skylake-avx512 MKL_CBWR=AVX512",
}
BATCH_SIZE = 16
# Label -> checkpoint of the family, decoder and settings.
SYSTEMS = {
    "ReFusion": ("refusion", "refusion", ("fuse=false",)),
    "ReFusion, verifier": ("refusion", "refusion", ("fuse=false", "completion=verifier")),
    "BD3-LM, merged": ("bd3lm", "bd3lm", ("separate_commit=false",)),
    "BD3-LM": ("bd3lm", "bd3lm", ("separate_commit=true",)),
    "LLaDA w/ Fast-dLLM": ("llada", "fast_dllm_llada", ()),
    "I-DLM": ("idlm", "idlm", ()),
    "WeDLM": ("wedlm", "wedlm", ()),
    "AR-SFT": ("autoregressive_sft", "autoregressive", ()),
}


class Response(NamedTuple):
    is_right: bool
    tokens: tuple[int, ...]
    num_forwards: int


def variants() -> dict[str, str]:
    """Every variant, as NAME=VALUE of variables, with the reason why it is not run here; "" if it is."""
    own = torch.backends.cpu.get_cpu_capability()
    names = list(PROCESSORS)
    found = {}
    for level, (name, variables) in enumerate(PROCESSORS.items()):
        reason = "this processor computes so without it" if name == own else "this processor lacks the instructions"
        found[variables] = "" if own in names and level < names.index(own) else reason
    return found


def decode(folder: Path, limit: int) -> None:
    """Runs all systems on the first items of all mini tasks, each in a folder of its own."""
    for label, (checkpoint, decoder, settings) in SYSTEMS.items():
        words = ["run", "--model", f"embedded:{checkpoint}", "--decoder", decoder, "--tasks", "mini_suite"]
        words += ["--device", "cpu", "--batch-size", str(BATCH_SIZE), "--limit", str(limit)]
        words += [word for setting in settings for word in ("--set", setting)]
        cli.app([*words, "--run-dir", str(folder / label)], standalone_mode=False)


def responses(run_dir: Path) -> dict[tuple[str, str], Response]:
    """The responses of a run by task and item."""
    with RunReader.open(run_dir) as reader:
        right = {
            (score.key.task, score.item_id): score.value == 1 for score in reader.scores() if score.metric == "passed"
        }
        return {
            place: Response(right[place], tuple(sample.tokens or ()), sample.num_forwards)
            for sample in reader.samples()
            for place in [(sample.key.task, sample.item_id)]
        }


def rows_of(system: str, by_variant: dict[str, dict[tuple[str, str], Response]]) -> list[dict[str, object]]:
    """A row for each task and variant; `changed` counts responses that are not those of the own variant."""
    rows = []
    for task in sorted({task for task, _ in by_variant[OWN]}):
        for variant, found in by_variant.items():
            of_task = {place: response for place, response in found.items() if place[0] == task}
            rows.append(
                {
                    "system": system,
                    "task": task,
                    "variant": variant,
                    "items": len(of_task),
                    "right": sum(response.is_right for response in of_task.values()),
                    "tokens": sum(len(response.tokens) for response in of_task.values()),
                    "forwards": sum(response.num_forwards for response in of_task.values()),
                    "changed": sum(by_variant[OWN][place] != response for place, response in of_task.items()),
                }
            )
    return rows


def measure(
    limit: Annotated[int, typer.Option(min=1, help="Items of every mini task.")] = 100,
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = RESULTS,
    only_list: Annotated[bool, typer.Option("--list", help="Print variants and why one is not run, and stop.")] = False,
    decode_into: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Decodes items of the mini tasks under each variant that this machine can do, and writes what changes."""
    if only_list:
        print("\n".join(f"{variant}\t{reason}" for variant, reason in variants().items()))
        return
    if decode_into is not None:
        decode(decode_into, limit)
        return
    with TemporaryDirectory() as folder:
        found: dict[str, dict[str, dict[tuple[str, str], Response]]] = {system: {} for system in SYSTEMS}
        for variant, reason in {OWN: "", **variants()}.items():
            if reason:
                show_progress(f"{variant}: not run, because {reason}")
                continue
            show_progress(f"{variant}: decoding")
            place = Path(folder) / variant
            _run_under(variant, ["--decode-into", str(place), "--limit", str(limit)])
            for system in SYSTEMS:
                found[system][variant] = responses(place / system)
    rows = [row for system, by_variant in found.items() for row in rows_of(system, by_variant)]
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{sum(int(str(row['changed'])) for row in rows)} responses changed; wrote {out}")


def _run_under(variant: str, arguments: Sequence[str]) -> None:
    own = {} if variant == OWN else dict(part.split("=") for part in variant.split())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
    done = subprocess.run([sys.executable, __file__, *arguments], env=environment, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise RefusionEvalError(f"{variant}: decoding ended with status {done.returncode}; its messages stand above")


if __name__ == "__main__":
    run_script(measure)
