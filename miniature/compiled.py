"""Compiled layers for long training runs on a CPU, where operations between matrix products take half of a step.

torch.compile turns each group of such operations into one loop.
"""

import sys

import torch
from transformers import AttentionInterface, PreTrainedModel

from refusion_eval.training.data.packed import ATTENTION, packed_attention

# Compiling takes a minute, which about 250 steps of the models of `miniature` save.
MIN_STEPS = 500


def compile_layers(model: PreTrainedModel, num_steps: int) -> bool:
    """Compiles the layers of a model in place if a run of `num_steps` gains by it and the machine can.

    The weights keep their names. Losses and gradients are equal up to the order of sums, and under bfloat16 autocast up
    to its roundings, of which compiled layers have fewer.
    """
    if torch.cuda.is_available() or num_steps < MIN_STEPS:
        return False
    try:
        torch.compile(lambda numbers: numbers.exp() + 1)(torch.ones(8))
    except (RuntimeError, OSError) as problem:
        cause = str(problem).partition("\n")[0]
        print(f"the layers are not compiled, as torch.compile needs a C++ compiler: {cause}", file=sys.stderr)
        return False
    # Attention is not a part of compiled layers, which would be compiled again for other lengths of examples.
    AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))
    decoder = model.get_decoder()
    for module in (*decoder.layers, decoder.norm, decoder.rotary_emb):
        module.compile(dynamic=True)  # packs differ in their number of rows
    return True
