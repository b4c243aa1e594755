"""`python -m refusion_eval.training.embedded`: tokenizer, AR backbone and its fine-tunes, from nothing.

The fine-tunes (ReFusion, AR SFT, LLaDA, BD3-LM) all start from the backbone's last state and take equally many samples
in equally many steps, so that they can be compared, and be made in any order.

Reproducible: data, batches, corruption and initial weights come from one seed; floating-point sums depend on the
number of threads, which is recorded. Interrupted, the same command goes on where it stopped.
"""

import argparse
import functools
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.benchmarks.mini.drills import DRILLS, drill_pairs
from refusion_eval.benchmarks.mini.generate import DRAWS, held_out_items, items
from refusion_eval.benchmarks.mini.item import Item
from refusion_eval.decoders import trained_decoders
from refusion_eval.errors import ConfigError
from refusion_eval.training.check import exact_share
from refusion_eval.training.checkpoints.save import save_checkpoint
from refusion_eval.training.config import MASKED_OBJECTIVES, TrainConfig
from refusion_eval.training.data.samples import Sample, encode
from refusion_eval.training.initial import prepare_for_lookup
from refusion_eval.training.model_card import write_card
from refusion_eval.training.tokenizer import train_tokenizer
from refusion_eval.training.train import train

SEED = 2512
VOCABULARY_SIZE = 2048
NUM_TOKENIZER_ITEMS = 3000
NUM_TRAIN_ITEMS = 15_000
NUM_DRILL_ITEMS = 20_000
NUM_CHECK_ITEMS = 60
NUM_POSITIONS = 2048

BACKBONE = "autoregressive"
_FINE_TUNE = TrainConfig(
    objective="sft", num_steps=3600, tokens_per_batch=2560, peak_lr=3e-3, muon_lr=0.02, seed=SEED + 3
)
STAGES: dict[str, TrainConfig] = {
    BACKBONE: TrainConfig(
        objective="sft", num_steps=1600, tokens_per_batch=2048, peak_lr=3e-3, muon_lr=0.02, seed=SEED + 1
    ),
    "refusion": replace(_FINE_TUNE, objective="refusion", seed=SEED + 2, slot_sizes=(4, 8), eos_multiple=32),
    "autoregressive_sft": _FINE_TUNE,
    # Its decoder fills a canvas of 64 whatever the answer's length, so that it has to know EOS up to there.
    "llada": replace(_FINE_TUNE, objective="llada", seed=SEED + 4, eos_multiple=64),
    # Its decoder ends with the block that holds EOS: whole blocks would do, and the filling is ReFusion's.
    "bd3lm": replace(_FINE_TUNE, objective="bd3lm", seed=SEED + 5, eos_multiple=32, block_size=8),
}
DATA_PERCENTS = (1, 3, 10, 30)  # of the samples that the ReFusion stage sees; that stage is the 100
SLOT_PERCENT = 10
SLOT_SIZES = (4, 8, 16, 32)


def _shortened(percent: int, **changes: Any) -> TrainConfig:
    """ReFusion's stage on the first part of its samples, each seen once, with its schedules shortened likewise."""
    config = STAGES["refusion"]
    return replace(
        config,
        num_steps=config.num_steps * percent // 100,
        num_warmup_steps=min(config.num_warmup_steps, config.num_steps * percent // 1000),
        **changes,
    )


# Studies of one quantity: the data (Appendix C.3: more samples, each once) or the slots trained on; not shipped.
VARIANTS: dict[str, TrainConfig] = {f"refusion_data_{percent}": _shortened(percent) for percent in DATA_PERCENTS} | {
    f"refusion_slots_{size}": _shortened(SLOT_PERCENT, slot_sizes=(size,)) for size in SLOT_SIZES
}


def _pairs(benchmark: str, some: Sequence[Item]) -> list[tuple[str, str]]:
    return [(BENCHMARKS[benchmark].prompt(item.prompt_row), item.response) for item in some]


def train_pairs(benchmark: str, count: int) -> list[tuple[str, str]]:
    """The first `count` (query, response) pairs of a mini task's training stream."""
    return _pairs(benchmark, list(islice(items(benchmark, test=False, seed=SEED), count)))


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A tiny Qwen3 with the head size and rotary base of the 8B model, initialised at random from the seed."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=512,
        max_position_embeddings=NUM_POSITIONS,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        mask_token_id=tokenizer.mask_token_id,
    )
    model = Qwen3ForCausalLM(config).float()
    prepare_for_lookup(model)
    return model


def _log(
    stage: str,
    model: Qwen3ForCausalLM,
    check: Mapping[str, Sequence[Sample]],
    every: int,
    reads_left_to_right: bool,
    line: dict[str, Any],
) -> None:
    text = f"{stage} step {line['step']} {line['seconds']:.0f} s ar {line['ar']:.4f} mdm {line['mdm']:.4f}"
    if line["step"] % every == 0 and reads_left_to_right:
        model.eval()
        shares = {benchmark: exact_share(model, samples) for benchmark, samples in check.items()}
        model.train()
        text += " exact " + " ".join(f"{benchmark} {share:.2f}" for benchmark, share in shares.items())
    print(f"{text} ({line['tokens_per_second']} tokens/s)", flush=True)


def _tokenizer(work_dir: Path) -> PreTrainedTokenizerFast:
    target = work_dir / "tokenizer"
    if not target.exists():
        pairs = [pair for benchmark in DRAWS for pair in train_pairs(benchmark, NUM_TOKENIZER_ITEMS)]
        turns = [text for query, response in pairs for text in ("user\n" + query, "assistant\n" + response)]
        part = work_dir / "tokenizer.part"
        train_tokenizer(turns, VOCABULARY_SIZE).save_pretrained(part)
        os.replace(part, target)
    return PreTrainedTokenizerFast.from_pretrained(target)


def build(work_dir: Path, out_dir: Path, *, num_threads: int, stages: Sequence[str] = tuple(STAGES)) -> None:
    """Trains stages and writes `<out_dir>/<stage>` for each.

    Args:
        work_dir: tokenizer, resumable states and metrics; safe to delete once done.
        out_dir: gets the checkpoints and their cards.
        num_threads: CPU threads of torch.
        stages: names of `STAGES` and `VARIANTS`.

    Raises:
        ConfigError: a stage is unknown.
    """
    check_names(stages)
    torch.set_num_threads(num_threads)
    work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(work_dir)
    samples = [sample for name in DRAWS for sample in encode(tokenizer, train_pairs(name, NUM_TRAIN_ITEMS))]
    check = {name: encode(tokenizer, _pairs(name, held_out_items(name)[:NUM_CHECK_ITEMS])) for name in DRAWS}
    print(f"{len(tokenizer)} token ids, {len(samples)} training samples", flush=True)
    model = new_model(tokenizer)
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters", flush=True)
    for name in DRILLS:
        samples += encode(tokenizer, drill_pairs(name, seed=SEED, count=NUM_DRILL_ITEMS))
    train_stages(model, tokenizer, samples, check, work_dir, out_dir, stages=stages)


def check_names(stages: Sequence[str]) -> None:
    """Refuses an empty list and names that are neither in `STAGES` nor in `VARIANTS`.

    Raises:
        ConfigError: likewise.
    """
    known = STAGES | VARIANTS
    unknown = [name for name in stages if name not in known]
    if unknown or not stages:
        problem = f"there is no stage {', '.join(map(repr, unknown))}" if unknown else "no stage is named"
        raise ConfigError(f"stages: {problem}; known: {', '.join(known)}")


def train_stages(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    samples: Sequence[Sample],
    check: Mapping[str, Sequence[Sample]],
    work_dir: Path,
    out_dir: Path,
    *,
    stages: Sequence[str],
    configs: Mapping[str, TrainConfig] = STAGES | VARIANTS,
) -> None:
    """Trains stages of a family, each fine-tune from the backbone's last state with fresh optimizers.

    Args:
        model: as it was initialised; its weights change.
        tokenizer: goes into the checkpoints.
        samples: what is trained on.
        check: benchmark -> samples on which causal models are watched.
        work_dir: states; that of the backbone is loaded from it, or comes to be.
        out_dir: gets `<out_dir>/<stage>`, of these stages alone.
        stages: names of `configs`.
        configs: the family: the backbone and its fine-tunes.
    """
    hardware = (
        f"{os.cpu_count()} CPU cores ({platform.machine()}), {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )

    def run(stage: str) -> None:
        config = configs[stage]
        causal = config.objective not in MASKED_OBJECTIVES
        train(
            model,
            samples,
            config,
            work_dir / stage,
            on_log=functools.partial(_log, stage, model, check, 200, causal),
        )
        if stage in stages:
            save_checkpoint(model, tokenizer, out_dir / stage, decoders=trained_decoders(config.objective))
            chain = {name: configs[name] for name in (BACKBONE, stage)}
            write_card(out_dir / stage, stage, chain, work_dir, num_samples=len(samples), hardware=hardware)

    run(BACKBONE)
    backbone = {name: value.clone() for name, value in model.state_dict().items()}
    for stage in stages:
        if stage != BACKBONE:
            model.load_state_dict(backbone)
            run(stage)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the embedded checkpoints from nothing.")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/embedded"), help="states and metrics")
    parser.add_argument("--out-dir", type=Path, default=Path(__file__).parents[1] / "embedded", help="checkpoints")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads")
    parser.add_argument(
        "--stages",
        default=",".join(STAGES),
        help=f"those to train, with commas; the {BACKBONE} backbone is trained before others if the work dir lacks it; "
        f"there are also {', '.join(VARIANTS)} (default: %(default)s)",
    )
    arguments = parser.parse_args()
    stages = [name.strip() for name in arguments.stages.split(",")]
    try:
        build(arguments.work_dir, arguments.out_dir, num_threads=arguments.threads, stages=stages)
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
