"""Decodes with the Triton kernels on a CPU, under Triton's interpreter, and compares the tokens with plain torch."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from refusion_eval.decoders import DECODERS
from refusion_eval.decoders.autoregressive import AutoregressiveSettings
from refusion_eval.decoders.refusion import RefusionSettings
from refusion_eval.engine import recorded
from refusion_eval.engine.engine import Engine, Request
from refusion_eval.models import attention_kernels, fused, kernels
from refusion_eval.models.choices import MATRICES, SPLIT, Choices, Product, Switches
from tests.engine.random_model import EXPERTS, VOCAB_SIZE, random_transformer

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SETTINGS = {
    "autoregressive": AutoregressiveSettings(gen_length=4),
    "refusion": RefusionSettings(gen_length=8, slot_size=4, block_size=8, mask_id=VOCAB_SIZE - 1, tau_token=0.0),
}


def main() -> None:
    for name, operation in fused.OPERATIONS.items():
        operation.register_kernel("cpu", fused._kernel(name))
    recorded.WIDTHS = (1, 8, 24)
    recorded.CHECKED_CONTEXT = 9
    # Programs that share a row; the interpreter runs one after the other, and most have no share of rows this short.
    kernels.VOCABULARY_SPLITS = attention_kernels.MAX_SPLITS = 4
    model = random_transformer(num_layers=1)
    free, replayed = Engine(model, "sdpa"), Engine(model, "sdpa", record=recorded.recorder(model.device))
    for name, settings in SETTINGS.items():
        decode = DECODERS[name].decode
        assert replayed.run(decode, PROMPT, settings).tokens == free.run(decode, PROMPT, settings).tokens
        print(name, "same tokens")
        requests = [Request(decode, PROMPT[:length], settings) for length in (3, 8, 5)]
        results = [{index: out.tokens for index, out in engine.run_many(requests, 2)} for engine in (free, replayed)]
        assert results[0] == results[1]
        print(name, "same tokens in a batch")
    own = {"kernel": "dot", "block_n": 8, "block_k": 4, "num_warps": 4, "num_stages": 2}
    products = {matrix: {24: Product(**own, splits=2 if matrix in SPLIT else 1)} for matrix in MATRICES[:-1]}
    table = Choices(products=products, switches={24: Switches(joins=True, rotates=True, early=True)})
    recorded.choices_for = lambda *of: table
    switched = Engine(model, "sdpa", record=recorded.recorder(model.device))
    for name, settings in SETTINGS.items():
        decode = DECODERS[name].decode
        assert switched.run(decode, PROMPT, settings).tokens == free.run(decode, PROMPT, settings).tokens
        print(name, "same tokens with all switches")
    model = random_transformer(experts=EXPERTS)
    decode, settings = DECODERS["autoregressive"].decode, SETTINGS["autoregressive"]
    engines = (Engine(model, "sdpa"), Engine(model, "sdpa", record=recorded.recorder(model.device)))
    expected, found = (engine.run(decode, PROMPT, settings) for engine in engines)
    assert (found.tokens, found.num_experts_read) == (expected.tokens, expected.num_experts_read)
    print("same tokens of experts")


if __name__ == "__main__":
    main()
