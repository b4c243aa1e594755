"""Passes ReFusion to `model.generate` of transformers as `custom_generate`, and prints the answers to two questions.

python examples/transformers_generate.py

transformers prepares prompts, masks and generation config; this project's engine decodes the whole batch. The weights
are read once more, from the folder that the model came from, so changes to the model in memory have no effect here.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

import refusion_eval
from refusion_eval.errors import DecodeError
from refusion_eval.paths import embedded_path

QUESTIONS = (
    "Omar has 6 boxes with 4 apples each. A friend brings 9 apples. Then 8 of them break.",
    "There are 12 books on a shelf and 5 in a bag. Then Ben gets 4 more. Ben sells 8 of them.",
)
INSTRUCTION = "How many are there in the end?\n\nSolve this step by step. End with: The answer is <number>."

loaded_model = functools.cache(refusion_eval.load_model)


def refusion_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: list,
    stopping_criteria: list,
    generation_config: GenerationConfig,
    slot_size: int = 8,  # `generate` passes on a setting only if this signature names it
    block_size: int = 32,
    **model_inputs: Any,
) -> Tensor:
    """Decodes the rows of a batch together and returns prompts and responses, padded on the right."""
    if generation_config.do_sample or generation_config.num_beams > 1 or logits_processor:
        raise ValueError("this example decodes greedily; leave out sampling, beams and logits processors")
    loaded = loaded_model(model.name_or_path)
    settings = refusion_eval.decoder_settings(
        loaded,
        "refusion",
        gen_length=generation_config.max_length - input_ids.shape[1],
        slot_size=slot_size,
        block_size=block_size,
    )
    # A batch is padded on the left, and the mask says which tokens are a prompt's own.
    prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, model_inputs["attention_mask"], strict=True)]
    responses: dict[int, Tensor] = {}
    requests = [("refusion", prompt, settings) for prompt in prompts]
    for number, decoded in refusion_eval.generate_stream(loaded, requests, batch_size=len(requests)):
        if isinstance(decoded, DecodeError):
            raise decoded
        responses[number] = torch.tensor(decoded.tokens)
        print(f"row {number}: {len(decoded.tokens)} tokens in {decoded.num_forwards} forwards")
    rows = [responses[number] for number in range(len(prompts))]
    padding = generation_config.pad_token_id
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0 if padding is None else padding)
    return torch.cat((input_ids, padded.to(input_ids.device)), dim=1)


folder = embedded_path("refusion")
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
stock = AutoModelForCausalLM.from_pretrained(folder)
chats = [[{"role": "user", "content": f"{question} {INSTRUCTION}"}] for question in QUESTIONS]
inputs = tokenizer.apply_chat_template(
    chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
)
sequences = stock.generate(**inputs, custom_generate=refusion_generate, max_new_tokens=96, slot_size=8, block_size=8)
for question, sequence in zip(QUESTIONS, sequences, strict=True):
    print(question)
    print(f"  {tokenizer.decode(sequence[inputs['input_ids'].shape[1] :], skip_special_tokens=True)}")
