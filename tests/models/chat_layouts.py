"""Tokenizers and chat templates of the layouts that checkpoints have, and the token ids that each door gives a chat.

`python -m tests.models.chat_layouts` prints the table of doors and layouts.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from lm_eval.api.instance import Instance
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from refusion_eval import api
from refusion_eval.bench import bench
from refusion_eval.benchmarks import BENCHMARKS, Task
from refusion_eval.evaluation.loop import job_of
from refusion_eval.lm_eval_plugin.adapter import RefusionLM
from refusion_eval.paper.locality.study import LocalitySettings, encode_responses
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.system import System
from refusion_eval.training.data.token_cache import encode

TINY = Path(__file__).resolve().parents[1] / "data" / "parity" / "tiny"
ROW = {"question": "What is 2 plus 3?", "answer": "2 + 3 = 5\n#### 5"}
QUESTION = BENCHMARKS["gsm8k"].prompts.user(ROW)
CHAT = [{"role": "user", "content": QUESTION}]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_2 = "{% for m in messages %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]{% endfor %}"
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@dataclass(frozen=True)
class Layout:
    """What a checkpoint says of its special tokens.

    Attributes:
        template: chat template.
        special: five special tokens; the last one is the mask.
        bos, eos: which of them begin and end texts.
        adds: what the post-processor puts around a text.
        pieces: whether the tokenizer is of SentencePiece's kind, which puts a blank in front.
        config: further entries of tokenizer_config.json.
    """

    template: str
    special: Sequence[str]
    bos: str | None
    eos: str
    adds: str = "$A"
    pieces: bool = False
    config: Mapping[str, Any] | None = None


_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>")
_LLAMA_3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|mask|>")
_LLAMA_2 = ("<unk>", "<s>", "</s>", "<pad>", "<|mask|>")
_LLADA = ("<|startoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|mask|>")
_GEMMA = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")

LAYOUTS: Mapping[str, Layout] = {
    "Qwen3": Layout(CHATML, _QWEN, None, "<|im_end|>"),
    "Qwen2.5, add_bos_token": Layout(CHATML, _QWEN, None, "<|im_end|>", config={"add_bos_token": False}),
    "Dream": Layout(CHATML, _QWEN, "<|beginoftext|>", "<|endoftext|>"),
    "Llama-3": Layout(LLAMA_3, _LLAMA_3, _LLAMA_3[0], "<|eot_id|>", f"{_LLAMA_3[0]} $A"),
    "Llama-3, template without BOS": Layout(
        LLAMA_3.removeprefix("{{ bos_token }}"), _LLAMA_3, _LLAMA_3[0], "<|eot_id|>", f"{_LLAMA_3[0]} $A"
    ),
    "ChatML, BOS by post-processor": Layout(CHATML, _QWEN, "<|beginoftext|>", "<|im_end|>", "<|beginoftext|> $A"),
    "ChatML, EOS by post-processor": Layout(CHATML, _QWEN, None, "<|im_end|>", "$A <|im_end|>"),
    "ChatML, both by post-processor": Layout(
        CHATML, _QWEN, "<|beginoftext|>", "<|endoftext|>", "<|beginoftext|> $A <|endoftext|>"
    ),
    "LLaDA": Layout(LLAMA_3, _LLADA, _LLADA[0], "<|eot_id|>"),
    "Llama-2": Layout(LLAMA_2, _LLAMA_2, "<s>", "</s>", "<s> $A", True, {"tokenizer_class": "LlamaTokenizerFast"}),
    "Llama-2, add_eos_token": Layout(
        LLAMA_2, _LLAMA_2, "<s>", "</s>", "<s> $A </s>", True, {"add_bos_token": True, "add_eos_token": True}
    ),
    "Mistral, BOS by template alone": Layout(LLAMA_2, _LLAMA_2, "<s>", "</s>", pieces=True),
    "Gemma": Layout(
        GEMMA, _GEMMA, "<bos>", "<eos>", "<bos> $A", pieces=True, config={"tokenizer_class": "GemmaTokenizerFast"}
    ),
}


def save(layout: Layout, folder: Path) -> Path:
    """A tiny checkpoint with the tokenizer of a layout; returns its folder."""
    shutil.copytree(TINY, folder)
    for name in ("special_tokens_map.json", "chat_template.jinja"):
        (folder / name).unlink()
    backend = _pieces() if layout.pieces else Tokenizer(Tokenizer.from_file(str(TINY / "tokenizer.json")).model)
    if not layout.pieces:
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in layout.special])
    if layout.adds != "$A":
        ids = [(token, backend.token_to_id(token)) for token in layout.adds.split() if token != "$A"]
        backend.post_processor = TemplateProcessing(single=layout.adds, special_tokens=ids)
    names = {"bos_token": layout.bos, "eos_token": layout.eos, **(layout.config or {})}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **{key: value for key, value in names.items() if value})
    made.chat_template = layout.template
    made.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (layout.config or {})))
    return folder


def _pieces() -> Tokenizer:
    """A tokenizer of SentencePiece's kind: a blank in front, blanks as a sign, bytes for all else."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"▁": 257}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def by_transformers(folder: Path) -> list[int]:
    """What transformers makes of the chat."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return list(tokenizer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True)["input_ids"])


def _api(call: Callable[[api.LoadedModel], Any]) -> Callable[[Path], list[int]]:
    def ids(folder: Path) -> list[int]:
        with mock.patch.object(api, "check_prompt", wraps=api.check_prompt) as checked:
            call(api.load_model(str(folder), device="cpu"))
        return list(checked.call_args.args[1])

    return ids


def _args(folder: Path) -> Any:
    return parse_model_args({"pretrained": str(folder), "decoder": "autoregressive", "gen_length": 1, "warmup": 0})


def _run(folder: Path) -> list[int]:
    rows = folder / "rows" / "gsm8k" / "test.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text(json.dumps(ROW))
    task = Task(BENCHMARKS["gsm8k"])
    (item,) = task.items(str(folder / "rows"))
    return list(job_of(System(_args(folder)), task, item, task.benchmark.prompts.version, 0).prompt_ids)


def _lm_eval(folder: Path) -> list[int]:
    lm = RefusionLM(_args(folder))
    (job,) = lm._jobs([Instance("generate_until", {}, (lm.apply_chat_template(CHAT), {}), 0, ("x", 0, 1))])
    return list(job.prompt_ids)


def _likelihood(folder: Path) -> list[int]:
    """The ids of a scored text without its continuation, to which lm-eval moves the blanks before it."""
    lm = RefusionLM(_args(folder))
    request = Instance("loglikelihood", {}, (lm.apply_chat_template(CHAT), "5"), 0, ("x", 0, 1))
    with mock.patch.object(lm, "_loglikelihood_tokens") as scored:
        lm.loglikelihood([request])
    ((_, context, continuation),) = scored.call_args.args[0]
    return [*context, *continuation][:-1]


def _locality(folder: Path) -> list[int]:
    model = api.load_model(str(folder), device="cpu")
    ((response,), _) = encode_responses(model, [(QUESTION, "It is 5.")], LocalitySettings(num_responses=1))
    return list(response.prompt)


def _bench(folder: Path) -> list[int]:
    model = api.load_model(str(folder), device="cpu")
    with mock.patch.multiple(bench, PROMPTED=("gsm8k",), read_rows=lambda path: [ROW]):
        return list(bench.mini_prompts(model, 1)[0])


def _training(folder: Path) -> list[int]:
    (sample,) = encode(AutoTokenizer.from_pretrained(folder), [(QUESTION, "It is 5.")])
    return list(sample.prompt)


_SHORT = {"decoder": "autoregressive", "gen_length": 1}
DOORS: Mapping[str, Callable[[Path], list[int]]] = {
    "run": _run,
    "lm_eval": _lm_eval,
    "likelihood": _likelihood,
    "generate": _api(lambda model: api.generate(model, QUESTION, **_SHORT)),
    "generate_many": _api(lambda model: api.generate_many(model, [QUESTION], **_SHORT)),
    "training": _training,
    "locality": _locality,
    "bench": _bench,
}


def main() -> None:
    """Prints the tokens of the chat by layout and door, with a star where the ids are not those of transformers."""
    print(f"| layout | transformers | {' | '.join(DOORS)} |\n|{'---|' * (len(DOORS) + 2)}")
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as place:
            folder = save(layout, Path(place) / "checkpoint")
            expected = by_transformers(folder)
            found = [door(folder) for door in DOORS.values()]
        cells = [f"{len(ids)}{'' if ids == expected else ' *'}" for ids in found]
        print(f"| {name} | {len(expected)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
