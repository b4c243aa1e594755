"""The commands whose outcome is guarded: runs of every decoder, scores, tables, lm-eval; quick ones and the rest."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.guard import checkpoints

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
RECORDS = FOLDER / "records"
DATA = FOLDER / "data"
# Runs made by the code of the records, of which the second decoded 2 items of 4.
STORED_RUN, STORED_BASELINE = FOLDER / "run_of_today", FOLDER / "run_of_today_ar"
RUN_MODULE = "refusion_eval"

SEVEN = ("mmlu_pro", "arc_challenge", "gsm8k", "math", "gpqa", "humaneval", "mbpp")
# What is measured on this machine otherwise, and decides how many forwards are fused.
PINNED = ("free_rows=0", "row_cost=0.02")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of one system; `{name}` in its arguments is a folder that `places` gives."""

    name: str
    model: str
    decoder: str
    tasks: tuple[str, ...] = SEVEN
    limit: int = 2
    settings: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    quick: bool = False
    real: bool = False
    measured: bool = False

    def arguments(self, run_dir: Path | str, places: dict[str, str]) -> list[str]:
        prefix = "refusion_" if self.real else "mini_"
        tasks = ",".join(prefix + task for task in self.tasks)
        given = ["run", "--model", self.model, "--decoder", self.decoder, "--tasks", tasks, "--limit", str(self.limit)]
        if "--warmup" not in self.more:
            given += ["--warmup", "0"]
        for setting in self.settings:
            given += ["--set", setting]
        return [part.format(**places) for part in (*given, *self.more)] + ["--run-dir", str(run_dir)]


def refusion(name: str, *settings: str, **others: object) -> Run:
    return Run(name=name, model="embedded", decoder="refusion", settings=settings, **others)


def llada(name: str, *settings: str, decoder: str = "llada", **others: object) -> Run:
    chosen = {"model": "embedded:llada", "tasks": ("gsm8k",)} | others
    return Run(name=name, decoder=decoder, settings=settings, **chosen)


def dream(name: str, *settings: str, decoder: str = "dream", **others: object) -> Run:
    chosen = {"model": "{dream}", "tasks": ("gsm8k", "arc_challenge")} | others
    return Run(name=name, decoder=decoder, settings=settings, **chosen)


def bd3lm(name: str, *settings: str, **others: object) -> Run:
    chosen = {"model": "embedded:bd3lm", "tasks": ("gsm8k",)} | others
    return Run(name=name, decoder="bd3lm", settings=settings, **chosen)


ONE = ("gsm8k",)
TWO = ("gsm8k", "mbpp")
QUICK_RUNS = (
    refusion("refusion", *PINNED),
    Run(name="autoregressive", model="embedded", decoder="autoregressive"),
    refusion("refusion_unfused", "fuse=false", tasks=ONE, limit=1),
    refusion("refusion_release", "release_compatible=true", tasks=ONE, limit=1),
    refusion("refusion_recompute_kv", "recompute_kv=true", *PINNED, tasks=ONE, limit=1),
    llada("llada_one", limit=1),
    llada("fast_dllm_llada_one", decoder="fast_dllm_llada", limit=1),
    llada("d2f_llada_one", decoder="d2f_llada", model="{llada}", limit=1),
    dream("dream_one", tasks=ONE, limit=1),
    dream("fast_dllm_dream_one", decoder="fast_dllm_dream", tasks=ONE, limit=1),
    dream("d2f_dream_one", decoder="d2f_dream", tasks=ONE, limit=1),
    bd3lm("bd3lm_one", limit=1),
    Run(name="esolm_one", model="embedded:refusion", decoder="esolm", tasks=ONE, limit=1),
    llada("sparse_llada_one", "cache=sparse", decoder="fast_dllm_llada", limit=1),
    llada(
        "dllm_cache_llada_one",
        *("prompt_interval_steps=8", "gen_interval_steps=4", "transfer_ratio=0.25"),
        limit=1,
    ),
)
FULL_RUNS = (
    refusion("refusion_measured", measured=True, more=("--warmup", "1")),
    refusion("refusion_unfused_seven", "fuse=false"),
    refusion("refusion_release_seven", "release_compatible=true"),
    refusion("refusion_release_fused", "release_compatible=true", "fuse=true", *PINNED, tasks=TWO),
    refusion("refusion_recompute_kv_seven", "recompute_kv=true", "fuse=false", limit=1),
    refusion("refusion_recompute_kv_fused", "recompute_kv=true", *PINNED, tasks=TWO),
    refusion("refusion_left_to_right", "left_to_right=true", *PINNED, tasks=TWO),
    refusion("refusion_verify_independently", "verify_independently=true", *PINNED, tasks=TWO),
    refusion("refusion_sampled", "temperature=0.7", *PINNED, tasks=TWO, more=("--seed", "3")),
    refusion("refusion_slots", "slot_size=4", "block_size=16", "gen_length=30", "tau_slot=0.5", *PINNED, tasks=TWO),
    refusion("refusion_wide", "free_rows=64", "row_cost=0.001", tasks=TWO),
    refusion("refusion_batch", *PINNED, limit=3, more=("--batch-size", "4", "--tps-samples", "1")),
    refusion("refusion_bfloat16", *PINNED, tasks=TWO, more=("--dtype", "bfloat16")),
    refusion("refusion_plain_prompts", *PINNED, "add_bos_token=true", tasks=ONE, more=("--chat-template", "none")),
    refusion(
        "refusion_named", *PINNED, tasks=ONE, more=("--name", "Own name", "--backbone", "Own backbone", "--no-thinking")
    ),
    Run(name="autoregressive_sft", model="embedded:autoregressive_sft", decoder="autoregressive"),
    Run(name="autoregressive_generate", model="embedded", decoder="autoregressive", more=("--loop", "generate")),
    Run(
        name="autoregressive_batch",
        model="embedded",
        decoder="autoregressive",
        limit=3,
        more=("--batch-size", "4", "--warmup", "1"),
    ),
    Run(
        name="autoregressive_sampled",
        model="embedded:refusion",
        decoder="autoregressive",
        tasks=TWO,
        settings=("temperature=0.9", "gen_length=40"),
    ),
    llada("llada_seven", tasks=SEVEN, limit=1),
    llada("llada_random", "remasking=random", "steps=32", "temperature=0.5"),
    llada("llada_guided", "cfg_scale=0.5", "gen_length=32", "early_stop=true"),
    llada("llada_eos", "logits_eos_inf=true", "confidence_eos_eot_inf=true", "gen_length=32", "steps=16"),
    llada("llada_release", "release_compatible=true", "gen_length=32", "confidence_dtype=float64", model="{llada}"),
    llada("llada_batch", "gen_length=32", limit=3, more=("--batch-size", "2", "--tps-samples", "1")),
    llada("llada_layout", tasks=SEVEN, limit=1, model="{llada}"),
    llada(
        "dllm_cache_llada",
        *("prompt_interval_steps=10", "gen_interval_steps=3", "transfer_ratio=0.5", "gen_length=32"),
        model="{llada}",
        tasks=SEVEN,
    ),
    llada("fast_dllm_llada_seven", decoder="fast_dllm_llada", tasks=SEVEN),
    llada("fast_dllm_llada_none", "cache=none", "factor=1.0", "threshold=none", decoder="fast_dllm_llada"),
    llada("fast_dllm_llada_prefix", "cache=prefix", "threshold=0.5", decoder="fast_dllm_llada"),
    llada("fast_dllm_llada_steps", "threshold=none", "steps=32", decoder="fast_dllm_llada"),
    llada("fast_dllm_llada_release", "release_compatible=true", decoder="fast_dllm_llada"),
    llada("sparse_llada", "cache=sparse", "keep_ratio=0.3", "kernel_size=5", decoder="fast_dllm_llada", tasks=TWO),
    llada("fast_dllm_llada_layout", decoder="fast_dllm_llada", model="{llada}", tasks=SEVEN),
    llada("d2f_llada_seven", decoder="d2f_llada", model="{llada}", tasks=SEVEN),
    llada("d2f_llada_adapter", decoder="d2f_llada", model="{llada}", more=("--adapter", "{llada_lora}")),
    llada("d2f_llada_margin", "sampling_strategy=margin_confidence", decoder="d2f_llada", model="{llada}"),
    dream("dream_seven", tasks=SEVEN, limit=1),
    dream("dream_origin", "alg=origin", "steps=32"),
    dream("dream_maskgit", "alg=maskgit_plus", "alg_temp=0.3", "steps=32"),
    dream("dream_margin", "alg=topk_margin", "temperature=0.4", "top_p=0.9", "steps=20"),
    dream("dream_top_k", "temperature=0.4", "top_k=5", "early_stop=true"),
    dream("dllm_cache_dream", "prompt_interval_steps=8", "gen_interval_steps=4", "transfer_ratio=0.25"),
    dream("dream_batch", limit=3, more=("--batch-size", "4")),
    dream("fast_dllm_dream_seven", decoder="fast_dllm_dream", tasks=SEVEN),
    dream("fast_dllm_dream_none", "cache=none", "threshold=0.5", "steps=32", decoder="fast_dllm_dream"),
    dream("fast_dllm_dream_prefix", "cache=prefix", "alg=entropy", "steps=32", decoder="fast_dllm_dream"),
    dream("sparse_dream", "cache=sparse", "keep_ratio=0.3", decoder="fast_dllm_dream"),
    dream("d2f_dream_seven", decoder="d2f_dream", tasks=SEVEN),
    dream("d2f_dream_adapter", decoder="d2f_dream", more=("--adapter", "{dream_lora}", "--chat-template", "none")),
    dream("d2f_dream_entropy", "sampling_strategy=neg_entropy", "block_add_threshold=0.5", decoder="d2f_dream"),
    bd3lm("bd3lm_seven", tasks=SEVEN),
    bd3lm("bd3lm_threshold", "threshold=0.8"),
    bd3lm("bd3lm_commit", "separate_commit=true", "steps_per_block=4"),
    bd3lm("bd3lm_release", "release_compatible=true", "remasking=random", "temperature=0.5"),
    bd3lm("bd3lm_refusion", "block_length=16", "steps=32", model="embedded:refusion"),
    Run(name="esolm_seven", model="embedded:refusion", decoder="esolm", limit=1),
    Run(
        name="esolm_contexts",
        model="embedded:refusion",
        decoder="esolm",
        tasks=ONE,
        settings=("alpha_0=0.5", "p_nucleus=0.9", "temperature=1.0", "gen_length=32"),
        more=("--seed", "5"),
    ),
    # The real benchmarks' layouts, prompts and settings tables.
    refusion("real_refusion", *PINNED, real=True, limit=3, more=("--data", "{data}")),
    Run(
        name="real_autoregressive",
        model="embedded",
        decoder="autoregressive",
        real=True,
        limit=3,
        settings=("gen_length=48",),
        more=("--data", "{data}", "--preset", "paper_implied"),
    ),
    llada(
        "real_llada",
        "gen_length=16",
        "block_length=8",
        real=True,
        model="{llada}",
        tasks=SEVEN,
        more=("--data", "{data}", "--preset", "official_blocks"),
    ),
    dream("real_dream", "gen_length=16", real=True, tasks=SEVEN, more=("--data", "{data}")),
)
RUNS = {run.name: run for run in (*QUICK_RUNS, *FULL_RUNS)}

# Commands whose output is compared to the letter: name -> arguments, and the files that they leave.
RESULTS_CSV, FAMILY_CSV = (str(ROOT / "results" / "embedded" / name) for name in ("results.csv", "family.csv"))
TEXTS: dict[str, list[str]] = {
    "systems": ["systems"],
    "filters": ["rescore", "--list-filters"],
    "figures": ["plot", "list"],
    "sweeps": ["sweep", "list"],
    **{
        f"gold_{task}": ["score", "--task", f"mini_{task}", "--outputs", "gold", "--csv", "scores.csv"]
        for task in SEVEN
    },
    "score_texts": ["score", "--task", "gsm8k", "--outputs", "texts.jsonl", "--data", "{data}", "--csv", "scores.csv"],
    "table": ["table", "{run}", "{baseline}", "--csv", "table.csv", "--markdown", "table.md"],
    "speed_run": ["speed", "{run}", "{baseline}", "--csv", "speed.csv", "--markdown", "speed.md"],
    "speed_csv": ["speed", RESULTS_CSV, "--csv", "speed.csv", "--markdown", "speed.md"],
    "compare": ["compare", "{run}", "{baseline}", "--csv", "c.csv", "--items", "i.csv", "--markdown", "c.md"],
    "claims": ["claims", "--out", "."],
    "claims_csv": ["claims", FAMILY_CSV, "--out", "."],
    "cost": ["cost"],
    "cost_run": ["cost", "{run}", "{baseline}", "--csv", "cost.csv", "--markdown", "cost.md"],
    "paper_tables": ["paper-table", "all", "--out", "."],
    "paper_tables_csv": ["paper-table", "1,2,6,7", FAMILY_CSV, "--out", "."],
    "paper_tables_run": ["paper-table", "1,2,4,6", "{run}", "{baseline}", "--out", "."],
    "rescore_run": ["rescore", "{run}", "--filter", "ours", "--out", "."],
    "figure1": ["plot", "figure1", RESULTS_CSV, "--task", "mbpp", "--out", "."],
    "figure9": ["plot", "figure9", "{run}", "--out", "."],
}
QUICK_TEXTS = ("systems", "gold_gsm8k", "table", "speed_csv", "compare", "claims_csv", "paper_tables_csv")
TEXT_FILES = (".csv", ".md", ".tex")

SCORED = (
    {"id": "0", "text": "7 + 5 = 12. The answer is 12."},
    {"id": "1", "text": "I do not know."},
    {"id": "2", "text": "The answer is 7. No: the answer is 1,080."},
)

# The runs of which the tables above tell; continued with more items by a test.
STORED = {
    STORED_RUN: ("run", "--tasks", "mini_gsm8k,mini_humaneval", "--set", "free_rows=0", "--set", "row_cost=0.02"),
    STORED_BASELINE: ("run", "--decoder", "autoregressive", "--tasks", "mini_gsm8k,mini_humaneval"),
}
STORED_LIMIT, CONTINUED_LIMIT = 2, 4

# lm_eval's own command: name -> task options and model arguments. `guard_choice` is in this folder.
LM_EVAL: dict[str, tuple[str, str]] = {
    "generate": (
        "mini_gsm8k,mini_humaneval,mini_gpqa,refusion_gpqa --limit 3 --apply_chat_template --confirm_run_unsafe_code",
        "pretrained=embedded,data_dir={data},free_rows=0,row_cost=0.02",
    ),
    "generate_kwargs": (
        "mini_gsm8k --limit 3 --apply_chat_template --num_fewshot 0 --gen_kwargs max_gen_toks=40,until=answer",
        "pretrained=embedded,decoder=autoregressive,batch_size=2",
    ),
    "likelihood": ("guard_choice", "pretrained=embedded"),
    "likelihood_llada": ("guard_choice", "pretrained=embedded:llada,decoder=llada,mc_samples=8"),
}


def environment(scratch: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REFUSION_EVAL")}
    python_path = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    fixed = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    looks = {"COLUMNS": "140", "NO_COLOR": "1", "TERM": "dumb", "CUDA_VISIBLE_DEVICES": ""}
    return kept | fixed | looks | {"HF_HOME": str(scratch / "hub"), "PYTHONPATH": python_path}


def execute(commands: list[tuple[str, str, list[str]]], folder: Path, scratch: Path) -> dict[str, dict]:
    """Runs (name, module, arguments) in one process that stands in a folder; name -> how it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    asked, answers = folder / "asked.json", folder / "answers.json"
    asked.write_text(json.dumps(commands))
    program = [sys.executable, str(FOLDER / "commands.py"), str(asked), str(answers)]
    process = subprocess.run(program, cwd=folder, env=environment(scratch), stderr=subprocess.PIPE, text=True)
    done = json.loads(answers.read_text()) if answers.is_file() else {}
    lost = {"status": f"the process ended with {process.returncode}", "stdout": "", "stderr": process.stderr[-4000:]}
    return {name: done.get(name, lost) for name, _, _ in commands}


def places(scratch: Path) -> dict[str, str]:
    """Folders that commands name, with random checkpoints made anew."""
    made = checkpoints.make_all(scratch / "checkpoints")
    return made | {"data": str(DATA), "run": str(STORED_RUN), "baseline": str(STORED_BASELINE)}
