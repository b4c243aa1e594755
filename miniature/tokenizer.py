"""The small tokenizer of the embedded checkpoints: byte-level BPE, single digits, ChatML turns.

The special tokens have the names that Qwen3 and the published ReFusion checkpoint use, so that the same code serves
embedded and published models.
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from refusion_eval.training.checkpoints.backbone import MASK, START

PAD, TURN_START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, END, START, MASK)

# In this order: a letter that begins the line of an option, a letter in brackets (each one piece, so that an option and
# its letter are adjacent tokens), a word with its blank, one digit, punctuation with its blank, a line break with its
# indentation, other white space.
_PIECES = r"\n[A-J]\.| \([A-J]\)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n *|\s+"

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Learns a byte-level BPE vocabulary with a chat template; the special tokens take the last ids.

    Args:
        texts: prompts and responses; the result depends on them only.
        vocabulary_size: maximal number of ids, special tokens included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        bos_token=START,
        mask_token=MASK,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
