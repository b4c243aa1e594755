"""`python -m refusion_eval.training.embedded`: trains the tokenizer, the AR backbone and its fine-tunes from scratch.

All fine-tunes (ReFusion, AR SFT, LLaDA, BD3-LM) start from the last state of the backbone and take the same number of
samples and steps, so that they are comparable and can be trained in any order.

Data, batches, corruption and initial weights depend on one seed. Floating-point sums also depend on the number of
threads, which is recorded. The same command continues an interrupted training.
"""

import argparse
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
from refusion_eval.benchmarks.mini.generate import DRAWS, held_out_items
from refusion_eval.benchmarks.mini.generate import items as stream_items
from refusion_eval.benchmarks.mini.item import Item
from refusion_eval.decoders import trained_decoders
from refusion_eval.errors import ConfigError
from refusion_eval.training.checkpoints.save import save_backbone
from refusion_eval.training.config import MASKED_OBJECTIVES, TrainConfig
from refusion_eval.training.data.samples import TrainingSample, encode
from refusion_eval.training.model_card import write_card
from refusion_eval.training.tokenizer import train_tokenizer
from refusion_eval.training.train import exact_share, train

SEED = 2512
VOCABULARY_SIZE = 2048
NUM_TOKENIZER_ITEMS = 3000
NUM_TRAIN_ITEMS = 15_000
NUM_DRILL_ITEMS = 20_000
NUM_CHECK_ITEMS = 60
STEPS_PER_CHECK = 200
NUM_POSITIONS = 2048

# Share and gain of the fastest rotary pairs, which encode distance rather than content.
FAST_SHARE, FAST_GAIN = 0.5, 0.3

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
    # The decoder always fills a canvas of 64 tokens, so the model has to predict EOS up to its end.
    "llada": replace(_FINE_TUNE, objective="llada", seed=SEED + 4, eos_multiple=64),
    # The decoder ends with the block that contains EOS: whole blocks would do; the filling is that of ReFusion.
    "bd3lm": replace(_FINE_TUNE, objective="bd3lm", seed=SEED + 5, eos_multiple=32, block_size=8),
}
DATA_PERCENTS = (1, 3, 10, 30)  # share of the samples of the ReFusion stage, which is 100
SLOT_PERCENT = 10
SLOT_SIZES = (4, 8, 16, 32)


def _shortened(percent: int, **changes: Any) -> TrainConfig:
    """The ReFusion stage on its first samples, each seen once, with proportionally shorter schedules."""
    config = STAGES["refusion"]
    return replace(
        config,
        num_steps=config.num_steps * percent // 100,
        num_warmup_steps=min(config.num_warmup_steps, config.num_steps * percent // 1000),
        **changes,
    )


# Studies of one quantity, not shipped: the number of samples (Appendix C.3), or the slot size in training.
VARIANTS: dict[str, TrainConfig] = {f"refusion_data_{percent}": _shortened(percent) for percent in DATA_PERCENTS} | {
    f"refusion_slots_{size}": _shortened(SLOT_PERCENT, slot_sizes=(size,)) for size in SLOT_SIZES
}


def _pairs(benchmark: str, items: Sequence[Item]) -> list[tuple[str, str]]:
    return [(BENCHMARKS[benchmark].prompt(item.prompt_row), item.response) for item in items]


def train_pairs(benchmark: str, count: int) -> list[tuple[str, str]]:
    """The first `count` (query, response) pairs of the training stream of a mini task."""
    return _pairs(benchmark, list(islice(stream_items(benchmark, test=False, seed=SEED), count)))


@torch.no_grad()
def prepare_for_lookup(model: Qwen3ForCausalLM) -> None:
    """Changes random weights in place, so that the model attends by content from the first step.

    - In every layer but the first, the first key head is copied into the query heads that read it, which then attend to
      earlier occurrences of the same token (query-key product near the identity, after Trockman and Kolter, "Mimetic
      initialization of self-attention layers", arXiv 2305.09828). The query gains damp the fastest rotary pairs;
      otherwise the token itself would outweigh its earlier occurrences. The first layer stays random, because attention
      by distance forms there.
    - The outputs of the layers are zero, and the expected norm of an embedding is 1, so that later layers can read the
      token.
    """
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    num_pairs = config.head_dim // 2
    num_fast = int(FAST_SHARE * num_pairs)
    model.model.embed_tokens.weight.normal_(std=config.hidden_size**-0.5)
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        if number == 0:
            continue
        key_head = attention.k_proj.weight[: config.head_dim]
        attention.q_proj.weight[: group * config.head_dim] = key_head.repeat(group, 1)
        gains = attention.q_norm.weight.view(2, num_pairs)  # a pair's halves are num_pairs apart
        gains[:, :num_fast] = FAST_GAIN


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A tiny Qwen3 with the head size and rotary base of the 8B model and random weights from the seed."""
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
    """Checks that there is a name and that all names are in `STAGES` or `VARIANTS`.

    Raises:
        ConfigError: there is no name, or one is unknown.
    """
    known = STAGES | VARIANTS
    unknown = [name for name in stages if name not in known]
    if unknown or not stages:
        problem = f"there is no stage {', '.join(map(repr, unknown))}" if unknown else "no stage is named"
        raise ConfigError(f"stages: {problem}; known: {', '.join(known)}")


def train_stages(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    samples: Sequence[TrainingSample],
    check: Mapping[str, Sequence[TrainingSample]],
    work_dir: Path,
    out_dir: Path,
    *,
    stages: Sequence[str],
    configs: Mapping[str, TrainConfig] = STAGES | VARIANTS,
) -> None:
    """Trains stages; each fine-tune starts from the last state of the backbone with new optimisers.

    Args:
        model: model with initial weights, which are changed.
        tokenizer: tokenizer of the checkpoints.
        samples: training samples.
        check: samples of each benchmark on which causal models are measured during training.
        work_dir: folder of the states; the backbone is trained first if its state is missing.
        out_dir: folder in which `<out_dir>/<stage>` is written for each of `stages`.
        stages: keys of `configs`.
        configs: settings of the backbone and of all fine-tunes.
    """
    hardware = (
        f"{os.cpu_count()} CPU cores ({platform.machine()}), {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )

    def run(stage: str) -> None:
        config = configs[stage]

        def log(line: dict[str, Any]) -> None:
            text = f"{stage} step {line['step']} {line['seconds']:.0f} s ar {line['ar']:.4f} mdm {line['mdm']:.4f}"
            if line["step"] % STEPS_PER_CHECK == 0 and config.objective not in MASKED_OBJECTIVES:
                model.eval()
                shares = {benchmark: exact_share(model, held_out) for benchmark, held_out in check.items()}
                model.train()
                text += " exact " + " ".join(f"{benchmark} {share:.2f}" for benchmark, share in shares.items())
            print(f"{text} ({line['tokens_per_second']} tokens/s)", flush=True)

        train(model, samples, config, work_dir / stage, on_log=log)
        if stage in stages:
            decoders = trained_decoders(config.objective)
            save_backbone(model, tokenizer, out_dir / stage, decoders=decoders, dtype=torch.bfloat16)
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
    parser = argparse.ArgumentParser(description="Train the embedded checkpoints from scratch.")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/embedded"), help="states and metrics")
    parser.add_argument("--out-dir", type=Path, default=Path(__file__).parents[1] / "embedded", help="checkpoints")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads")
    parser.add_argument(
        "--stages",
        default=",".join(STAGES),
        help=f"stages to train, separated by commas; the {BACKBONE} backbone is trained first if --work-dir lacks it; "
        f"other names: {', '.join(VARIANTS)} (default: %(default)s)",
    )
    arguments = parser.parse_args()
    stages = [name.strip() for name in arguments.stages.split(",")]
    try:
        build(arguments.work_dir, arguments.out_dir, num_threads=arguments.threads, stages=stages)
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
