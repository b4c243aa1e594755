"""What a run directory says, read with nothing but SQLite, and how it is held against a stored record."""

import hashlib
import importlib.metadata
import json
import platform
import re
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path

SAMPLE_FIELDS = (
    *("benchmark", "item_id", "text", "tokens", "num_tokens", "num_forwards", "stop", "prompt_num_tokens"),
    *("batch_size", "error"),
)
SCORE_FIELDS = ("scorer", "metric", "value", "extracted", "verdict", "reason")
MANIFEST_FIELDS = (
    *("system", "backbone", "decoder", "settings", "tasks", "seed", "dtype", "device", "attention", "package_version"),
    *("checkpoint_hash", "checkpoint_revision", "batch_size", "warmup"),
)
KEY_FIELDS = ("task", "task_version", "doc_hash", "prompt_hash", "sample", "settings_hash")
# What follows from a measured width curve where no setting says it.
MEASURED = ("num_forwards", "trace", "floats")
# Confidences and likelihoods to the last bit: they are those of one kind of machine.
OF_MACHINE = ("floats", "resps", "filtered_resps")


def read_run(run_dir: Path) -> dict:
    """Everything of a run directory that does not depend on times, paths or the machine."""
    connection = sqlite3.connect(run_dir / "records.sqlite")
    told = json.loads((run_dir / "run.json").read_text())
    scores: dict[bytes, list] = {}
    rows = connection.execute("SELECT key, body FROM scores ORDER BY scorer, metric").fetchall()
    for key, body in rows:
        judged = json.loads(body)
        scores.setdefault(key, []).append({name: judged[name] for name in SCORE_FIELDS})
    settings, samples = [], []
    rows = connection.execute("SELECT key, body, trace FROM samples ORDER BY task, item_id, sample, key").fetchall()
    connection.close()
    for key, body, trace in rows:
        sample = json.loads(body)
        used = {"settings": sample["settings"], "source": sample["settings_source"]}
        if used not in settings:
            settings.append(used)
        sample_key = [sample["key"][name] for name in KEY_FIELDS]
        record = {"key": sample_key, "digest": key.hex(), **{name: sample[name] for name in SAMPLE_FIELDS}}
        record |= {"settings": settings.index(used), "scores": scores.pop(key, []), **_traced(trace)}
        samples.append(record)
    assert not scores, "scores without a sample"
    manifest, fingerprint = told["manifest"], told["fingerprint"]
    for name in fingerprint.keys() & set(MANIFEST_FIELDS):
        assert manifest[name] == fingerprint[name], f"run.json: {name} is two things"
    beside = [name for name in MANIFEST_FIELDS if name not in fingerprint]
    return {
        "manifest": {name: manifest[name] for name in beside} | {"arguments": sorted(manifest["arguments"])},
        "fingerprint": fingerprint,
        "expected": told.get("expected"),
        "settings": settings,
        "samples": samples,
    }


def _traced(packed: bytes | None) -> dict[str, str | None]:
    if packed is None:
        return {"trace": None, "floats": None}
    plain = zlib.decompress(packed[1:]) if packed[:1] == b"z" else packed[1:]
    without = json.dumps(json.loads(plain, parse_float=lambda _: None, parse_constant=lambda _: None))
    return {"trace": _hash(without), "floats": _hash(json.dumps(json.loads(plain)))}


def read_texts(folder: Path, outcome: dict, suffixes: tuple[str, ...], replaced: dict[str, str]) -> dict[str, str]:
    """What a command printed and the text files that it left, with names in place of folders."""
    texts = {"stdout": outcome["stdout"]}
    for path in sorted(path for path in folder.rglob("*") if path.suffix in suffixes):
        texts[path.relative_to(folder).as_posix()] = path.read_bytes().decode()
    for name, text in texts.items():
        for path, word in replaced.items():
            text = text.replace(path, word)
        texts[name] = text
    return texts


def read_lm_eval(folder: Path) -> dict:
    """Metrics of an lm-eval results file, and of the samples beside it what does not name the machine."""
    (results,) = folder.rglob("results_*.json")
    told = json.loads(results.read_text())
    record: dict = {name: told[name] for name in ("results", "versions", "n-shot", "higher_is_better", "n-samples")}
    record["samples"] = {}
    for path in sorted(folder.rglob("samples_*.jsonl")):
        task = re.fullmatch(r"samples_(.+)_\d{4}-.*\.jsonl", path.name)
        assert task is not None
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kept = ("doc_id", "doc", "target", "filter", "metrics", "doc_hash", "prompt_hash", "target_hash")
        kept = (*kept, "resps", "filtered_resps")
        record["samples"][task[1]] = [{name: row[name] for name in kept} for row in rows]
    return record


def machine() -> dict[str, str]:
    """What decides the last bits of a product."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"(?m)^model name\s*: (.*)$", info.read_text()) if info.is_file() else []
    return {"cpu": names[0] if names else platform.processor(), "torch": importlib.metadata.version("torch")}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def without(record: object, names: tuple[str, ...]) -> object:
    """A record without the entries of these names, at any depth."""
    if isinstance(record, dict):
        return {name: without(value, names) for name, value in record.items() if name not in names}
    return [without(value, names) for value in record] if isinstance(record, list) else record


def differences(stored: object, now: object, where: str = "") -> Iterator[str]:
    """One line for every entry of a record that is another now, or gone."""
    if isinstance(stored, dict) and isinstance(now, dict):
        for name in stored:
            if name not in now:
                yield f"{where}.{name}: gone, was {stored[name]!r}"
            else:
                yield from differences(stored[name], now[name], f"{where}.{name}")
        yield from (f"{where}.{name}: new, {now[name]!r}" for name in now if name not in stored)
    elif isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        for number, (before, after) in enumerate(zip(stored, now, strict=True)):
            yield from differences(before, after, f"{where}[{number}]")
    elif stored != now:
        yield f"{where}: was {stored!r}, is {now!r}"
