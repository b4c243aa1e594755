"""What each test would find out anew and is the same for all of them, found out once."""

import functools
import os
import pickle
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any


def find_out_once(folder: Path | None) -> None:
    """Wraps what the collected tests have imported; `folder` keeps for later processes what takes longest."""
    if "lm_eval.evaluator" in sys.modules:
        from torch.utils import collect_env

        # Versions and hardware, which it asks of pip and of other programs for each evaluation.
        collect_env.get_pretty_env_info = functools.cache(collect_env.get_pretty_env_info)
    if engine := sys.modules.get("refusion_eval.runs.own_engine"):
        engine.copy_bandwidth = functools.cache(engine.copy_bandwidth)
    if index := sys.modules.get("lm_eval.tasks._index"):
        _read_task_files_once(index, folder)


def _read_task_files_once(index: ModuleType, folder: Path | None) -> None:
    own, read, build = Path(index.__file__).parent, index.load_yaml, index.TaskIndex.build
    kept = folder and folder / f"{version('lm_eval')}-{Path(index.__file__).stat().st_mtime_ns}.pickle"

    @functools.cache
    def known() -> dict[tuple[Any, ...], bytes]:
        """The content of files by what was asked, packed, because who asks may change what it gets."""
        return pickle.loads(kept.read_bytes()) if kept and kept.is_file() else {}

    def read_once(path: Path, **options: Any) -> Any:
        if not Path(path).is_relative_to(own):
            return read(path, **options)
        asked = (str(path), *sorted(options.items()))
        if asked not in known():
            known()[asked] = pickle.dumps(read(path, **options))
        return pickle.loads(known()[asked])

    def build_and_keep(paths: Any, **options: Any) -> Any:
        before = len(known())
        entries = build(paths, **options)
        if kept and len(known()) > before:
            written = kept.with_suffix(f".{os.getpid()}")
            written.write_bytes(pickle.dumps(known()))
            written.replace(kept)
        return entries

    index.load_yaml, index.TaskIndex.build = read_once, staticmethod(build_and_keep)
