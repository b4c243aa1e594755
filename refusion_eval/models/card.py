"""What is known of a checkpoint beyond its layout: the kind of its training, special tokens and who published it."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from refusion_eval.errors import CheckpointError
from refusion_eval.models.checkpoint import family_name, is_diffusion_gemma, read_family, read_json
from refusion_eval.types import CheckpointKind
from refusion_eval.untrusted import names_code


@dataclass(frozen=True)
class Card:
    name: str
    backbone: str
    mask_id: int | None
    eos_ids: tuple[int, ...]
    kind: CheckpointKind
    decoders: tuple[str, ...] = ()
    shape: Mapping[str, object] = field(default_factory=dict)  # entries of config.json that tell a local copy
    display_name: str | None = None  # what tables call the model, if its config.json says it
    refused: str = ""  # why no decoder of this project decodes it, if none does
    sizes: Mapping[str, int] = field(default_factory=dict)  # settings of decoders that its config.json determines

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of decoders that the checkpoint determines; of which a decoder need not have all."""
        named = {"mask_id": self.mask_id, "eos_ids": self.eos_ids, **self.sizes}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def mask_is_in_files(self) -> bool:
        return self.mask_id is None and self.kind not in ("causal", "diffusion_gemma")


def _shape(model_type: str, vocab_size: int, width: int, num_layers: int, **more: object) -> dict[str, object]:
    sizes = {"vocab_size": vocab_size, "hidden_size": width, "num_hidden_layers": num_layers}
    return {"model_type": model_type, **sizes, **more}


LLADA_SHAPE: dict[str, object] = {"model_type": "llada", "embedding_size": 126464, "d_model": 4096, "n_layers": 32}
LLADA_EOS = (126081, 126348)  # <|endoftext|>, <|eot_id|>
QWEN_EOS = (151645, 151643)  # <|im_end|>, <|endoftext|>
DREAM_EOS = QWEN_EOS[::-1]
LLAMA_EOS = (128001, 128009)
SEED_EOS = (2,)  # of Seed-Coder's tokenizer and of iLLaDA's, which both have the mask as token 5
SDAR_MASK = 151669
_IN_BLOCKS = ("sdar", "sdar_moe", "DreamReasoner")  # families whose `block_size` is that of their training
_DMAX = (
    "DMax is decoded with embeddings between those of a token and of the mask, which no decoder here feeds; decode it "
    "by its own loop: --loop release --allow-code"
)
# Llama 3.1 has the same sizes and another end token; the context length distinguishes it.
LLAMA_SHAPE = _shape("llama", 128256, 4096, 32, max_position_embeddings=8192)

CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        # The release stops at <|im_end|> alone; its vocabulary ends with <|beginoftext|> and <|mask|>.
        Card("GSAI-ML/ReFusion", "Qwen3-8B", 151670, (151645,), "refusion", shape=_shape("qwen3", 151671, 4096, 36)),
        Card("Qwen/Qwen3-8B", "Qwen3-8B", None, QWEN_EOS, "causal", shape=_shape("qwen3", 151936, 4096, 36)),
        Card("Qwen/Qwen3-0.6B", "Qwen3-0.6B", None, QWEN_EOS, "causal", shape=_shape("qwen3", 151936, 1024, 28)),
        Card("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B", None, LLAMA_EOS, "causal", shape=LLAMA_SHAPE),
        # No shape: nothing in config.json distinguishes it from Qwen2-7B-Instruct.
        Card("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B", None, QWEN_EOS, "causal"),
        # These differ in training data, but not in the facts of a card.
        *(
            Card(name, "LLaDA-8B", 126336, LLADA_EOS, "llada", shape=LLADA_SHAPE)
            for name in (
                *("GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-1.5"),
                *("Zigeng/dParallel-LLaDA-8B-instruct", "d3LLM/d3LLM_LLaDA"),
            )
        ),
        # Neither its config.json nor its tokenizer says which token the mask is.
        *(
            Card(f"GSAI-ML/iLLaDA-8B-{name}", "iLLaDA-8B", 5, SEED_EOS, "llada", (), _shape("illada", 155136, 4096, 32))
            for name in ("Base", "Instruct")
        ),
        *(
            Card(name, "Qwen2.5-7B", 151666, DREAM_EOS, "dream", shape=_shape("Dream", 152064, 3584, 28))
            for name in (
                *("Dream-org/Dream-v0-Instruct-7B", "Dream-org/Dream-v0-Base-7B"),
                *("Dream-org/Dream-Coder-v0-Instruct-7B", "Dream-org/Dream-Coder-v0-Base-7B"),
                *("apple/DiffuCoder-7B-Base", "apple/DiffuCoder-7B-Instruct", "apple/DiffuCoder-7B-cpGRPO"),
                *("Zigeng/dParallel_Dream_7B_Instruct", "d3LLM/d3LLM_Dream", "Dream-org/DreamOn-v0-7B"),
            )
        ),
        # Its code has the ids of the mask and of <|im_end|>, at which it stops; its config.json has no mask.
        *(
            Card(f"Efficient-Large-Model/{name}", backbone, 151665, (151645,), "masked", ("fast_dllm_v2",), shape)
            for name, backbone, shape in (
                ("Fast_dLLM_v2_7B", "Qwen2.5-7B", _shape("Fast_dLLM_Qwen", 152064, 3584, 28)),
                ("Fast_dLLM_v2_1.5B", "Qwen2.5-1.5B", _shape("Fast_dLLM_Qwen", 151936, 1536, 28)),
            )
        ),
        # No shape: SDAR's and I-DLM's config.json say the same.
        *(
            Card(name, backbone, SDAR_MASK, DREAM_EOS, "masked", ("sdar", "autoregressive"))
            for name, backbone in (
                ("JetLM/SDAR-1.7B-Chat", "Qwen3-1.7B"),
                ("JetLM/SDAR-4B-Chat", "Qwen3-4B"),
                ("JetLM/SDAR-8B-Chat", "Qwen3-8B"),
                *((f"JetLM/SDAR-30B-A3B-{name}", "Qwen3-30B-A3B") for name in ("Chat", "Chat-b8", "Chat-b32", "Sci")),
                ("Gen-Verse/TraDo-4B-Instruct", "Qwen3-4B"),
                ("Gen-Verse/TraDo-8B-Instruct", "Qwen3-8B"),
                ("Gen-Verse/TraDo-8B-Thinking", "Qwen3-8B"),
            )
        ),
        *(
            Card(f"Dream-org/DreamReasoner-8B{suffix}", "Qwen3-8B", SDAR_MASK, DREAM_EOS, "masked", ("sdar",))
            for suffix in ("", "-Base")
        ),
        # LLaDA2.0-mini, trained further; no shape, because its config.json says the same.
        *(
            Card(f"Zigeng/DMax-{name}", "LLaDA2-mini", 156895, (156892,), "masked", ("llada2",), refused=_DMAX)
            for name in ("16B", "Math-16B", "Coder-16B")
        ),
        # Their config.json has no mask. LLaDA2.0 and 2.1 differ in no fact of a card.
        *(
            Card(
                f"inclusionAI/LLaDA{version}-{size}",
                f"LLaDA2-{size}",
                156895,
                (156892,),
                "masked",
                ("llada2",),
                _shape("llada2_moe", 157184, width, num_layers),
            )
            for size, width, num_layers in (("mini", 2048, 20), ("flash", 4096, 32))
            for version in ("2.0", "2.1")
        ),
        *(
            Card(f"yifanyu/I-DLM-{size}", f"Qwen3-{size}", SDAR_MASK, (151645,), "masked", ("idlm", "autoregressive"))
            for size in ("8B", "32B")
        ),
        # Its architecture tells it from Seed-Coder, which reads from left to right.
        *(
            Card(f"ByteDance-Seed/Stable-DiffCoder-8B-{name}", "Seed-Coder-8B", 5, SEED_EOS, "masked", ("sdar",), shape)
            for shape in [_shape("llama", 155136, 4096, 32, architectures=["StableDiffcoderForCausalLM"])]
            for name in ("Base", "Instruct")
        ),
        # Its config.json has the mask, but one stop token of two.
        *(
            Card(f"tencent/WeDLM-{name}", backbone, None, QWEN_EOS, "masked", ("wedlm", "autoregressive"), shape)
            for size, backbone, shape in (
                ("7B", "Qwen2.5-7B", _shape("wedlm", 152064, 3584, 28)),
                ("8B", "Qwen3-8B", _shape("wedlm", 151936, 4096, 36)),
            )
            for name in (f"{size}-Base", f"{size}-Instruct")
        ),
        # <eos>, <turn|> and a third one, of its generation_config.json. No shape: copies have that file too.
        Card("google/diffusiongemma-26B-A4B-it", "Gemma-4-26B-A4B", None, (1, 106, 50), "diffusion_gemma"),
        # The name alone tells what they were trained as; the mask is in the tokenizer.
        *(
            Card(f"dllm-hub/{backbone}-diffusion-{way}-v0.1", backbone, None, QWEN_EOS, "masked", (decoder,))
            for backbone in ("Qwen3-0.6B", "Qwen2.5-Coder-0.5B-Instruct")
            for way, decoder in (("mdlm", "llada"), ("bd3lm", "bd3lm"))
        ),
    )
}


def checkpoint_card(name: str, directory: Path) -> Card:
    # A copy or a fine-tune is recognised by its shape, unless its config.json has a backbone, decoders or a mask token
    # of its own. For all others: mask_token_id of config.json before the tokenizer's mask token before its token
    # "<|mask|>"; eos_token_id of generation_config.json before that of config.json.
    path = directory / "config.json"
    config = read_json(path)
    sizes = _sizes(config, path)
    known = CARDS.get(name) or next((card for card in CARDS.values() if _is_copy(config, card)), None)
    if known is not None:
        mask_id = _mask_id(config, directory) if known.mask_is_in_files else known.mask_id
        return replace(known, name=name, mask_id=mask_id, sizes=sizes)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    family = read_family(directory, family_name(config))
    decoders = config.get("decoders", list(family.decoders) if family else [])
    if not isinstance(decoders, list) or not all(isinstance(decoder, str) and decoder for decoder in decoders):
        raise CheckpointError(f"{path}: decoders is {reprlib.repr(decoders)}; it must be a list of decoder names")
    if places := [decoder for decoder in decoders if names_code(decoder)]:
        raise CheckpointError(
            f"{path}: decoders names code, {reprlib.repr(places[0])}, which a checkpoint must not choose; write names "
            "of installed decoders there, and give your own with --decoder"
        )
    display_name = config.get("display_name")
    if not isinstance(display_name, str | None):
        raise CheckpointError(f"{path}: display_name is {reprlib.repr(display_name)}; it must be a text")
    has_masks = not is_diffusion_gemma(config)  # its tokenizer has a token of that name, of which it knows nothing
    mask_id = _mask_id(config, directory) if has_masks else None
    # The row of a mask predicts it, from the whole text, where transformers computes a masked language model.
    stock_kind: CheckpointKind | None = "llada" if is_masked_model(config) else None
    kind = (stock_kind if has_masks else "diffusion_gemma") if family is None else family.kind
    return Card(
        name=name,
        backbone=str(config.get("backbone", config.get("model_type", "unknown"))),
        mask_id=mask_id,
        eos_ids=_ids(generation_path, "eos_token_id", generation.get("eos_token_id"))
        or _ids(path, "eos_token_id", config.get("eos_token_id")),
        kind=kind or ("causal" if mask_id is None else "masked"),
        decoders=tuple(decoders),
        display_name=display_name,
        sizes=sizes,
    )


def is_masked_model(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a masked language model, which fills masks from the whole text around them."""
    return any(str(name).endswith("ForMaskedLM") for name in config.get("architectures") or [])


def _is_copy(config: Mapping[str, Any], card: Card) -> bool:
    if not card.shape or "backbone" in config or "decoders" in config:
        return False
    same_mask = card.mask_is_in_files or config.get("mask_token_id", card.mask_id) == card.mask_id
    return same_mask and all(config.get(key) == value for key, value in card.shape.items())


def _sizes(config: Mapping[str, Any], path: Path) -> dict[str, int]:
    named = {}  # setting -> its key, and the value
    if family_name(config) in _IN_BLOCKS and config.get("block_size") is not None:
        named["block_length"] = "block_size", config["block_size"]
    if is_diffusion_gemma(config):
        text = config.get("text_config")
        named["canvas_length"] = "canvas_length", config.get("canvas_length", 256)
        named["vocab_size"] = "vocab_size", text.get("vocab_size") if isinstance(text, Mapping) else None
    for key, size in named.values():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise CheckpointError(f"{path}: {key} is {reprlib.repr(size)}; it must be a positive whole number")
    sizes = {setting: size for setting, (_, size) in named.items()}
    if (token := config.get("expand_token_id")) is not None:  # by which DreamOn makes two masks of one
        (sizes["expand_id"],) = _ids(path, "expand_token_id", [token])
    return sizes


def _mask_id(config: Mapping[str, Any], directory: Path) -> int | None:
    mask_id = config.get("mask_token_id")
    mask_id = _tokenizer_mask_id(directory) if mask_id is None else mask_id
    ids = _ids(directory / "config.json", "mask_token_id", [] if mask_id is None else [mask_id])  # never a list
    return next(iter(ids), None)


def _ids(path: Path, key: str, value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise CheckpointError(f"{path}: {key} is {value!r}; it must be a token id or a list of token ids")
    return tuple(ids)


def _tokenizer_mask_id(directory: Path) -> int | None:
    path, tokenizer_path = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not path.is_file():
        return None
    raw = read_json(path)
    try:
        mask_token = raw.get("mask_token") or "<|mask|>"
        if isinstance(mask_token, Mapping):
            mask_token = mask_token.get("content")
        for token_id, token in raw.get("added_tokens_decoder", {}).items():
            if token.get("content") == mask_token:
                return int(token_id)
        added = read_json(tokenizer_path).get("added_tokens", []) if tokenizer_path.is_file() else []
        return next((token["id"] for token in added if token.get("content") == mask_token), None)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        form = f"lists its added tokens in an unknown form ({error!r})"
        raise CheckpointError(f"{path} or tokenizer.json beside it {form}; download both files again") from error
