"""`model.generate(..., custom_generate=...)`: the same tokens as the front door, whatever transformers prepares."""

import gc
import io
import subprocess
import sys
import weakref
from itertools import chain

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    TextStreamer,
)

import refusion_eval
from refusion_eval.errors import CheckpointError, ConfigError, DecodeError
from refusion_eval.hf import SlotStreamer, generate_with, refusion_generate, release
from refusion_eval.hf.hosted import hosted
from refusion_eval.types import Trace
from tests.models import tiny

PROMPT = [1, 2, 3]
# A fixed cost of rows: what is measured decides how many forwards there are.
SMALL = {"slot_size": 4, "block_size": 8, "free_rows": 0, "row_cost": 0.02}
# Low thresholds: a random model is certain of nothing.
EAGER = SMALL | {"tau_slot": 0.05, "tau_token": 0.05}
STRICT = SMALL | {"tau_slot": 0.9, "tau_token": 0.4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    tiny.save_checkpoint(path)
    return path


@pytest.fixture
def model(directory):
    return AutoModelForCausalLM.from_pretrained(directory)


@pytest.fixture(scope="module")
def ours(directory):
    return refusion_eval.load_model(directory, device="cpu")


def ids(*rows):
    return torch.tensor(rows)


def generate(model, input_ids, **arguments):
    return model.generate(
        input_ids, **{"custom_generate": refusion_generate, "max_new_tokens": 16, **EAGER, **arguments}
    )


@pytest.mark.parametrize("settings", [STRICT, EAGER, EAGER | {"fuse": False}, EAGER | {"left_to_right": True}])
@pytest.mark.parametrize("length", [5, 16])
def test_the_tokens_are_those_of_the_front_door(model, ours, settings, length):
    expected = refusion_eval.generate(ours, PROMPT, gen_length=length, **settings)
    out = generate(model, ids(PROMPT), max_new_tokens=length, return_dict_in_generate=True, **settings)
    assert out.sequences.tolist() == [[*PROMPT, *expected.tokens]]
    assert (out.decoded[0].tokens, out.decoded[0].trace.events) == (expected.tokens, expected.trace.events)


def test_the_embedded_checkpoint_answers_alike(checkpoint):
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    ours = refusion_eval.load_model(checkpoint, device="cpu")
    question = "Tom has 4 boxes with 6 pens each. Tom sells 5 of them. Then Tom gets 2 more. "
    question += "How many pens are there in the end?\n\nSolve this step by step. End with: The answer is <number>."
    text = ours.tokenizer.render_chat([{"role": "user", "content": question}])
    prompt = ours.tokenizer.encode(text)
    settings = STRICT | {"slot_size": 8, "block_size": 32}
    expected = refusion_eval.generate(ours, prompt, gen_length=64, **settings)
    file = io.StringIO()
    streamer = SlotStreamer(ours.tokenizer.inner, file)
    out = generate(theirs, ids(prompt), max_new_tokens=64, do_sample=False, streamer=streamer, **settings)
    assert out[0, len(prompt) :].tolist() == list(expected.tokens)
    assert file.getvalue().endswith("\n" + ours.tokenizer.decode(expected.tokens) + "\n")


def test_a_left_padded_batch_equals_its_rows(model):
    rows = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    padded = ids(*([0] * (5 - len(row)) + row for row in rows))
    mask = ids(*([0] * (5 - len(row)) + [1] * len(row) for row in rows))
    # Ended by whatever token the first row has in its middle, so that responses differ in length.
    eos = int(generate(model, ids(rows[0]), eos_token_id=None)[0, 3 + 6])
    batch = generate(model, padded, attention_mask=mask, eos_token_id=eos, pad_token_id=17)
    alone = [generate(model, ids(row), eos_token_id=eos)[0, len(row) :].tolist() for row in rows]
    assert len({len(row) for row in alone}) > 1
    assert batch[:, :5].equal(padded)
    longest = max(len(row) for row in alone)
    assert batch[:, 5:].tolist() == [row + [17] * (longest - len(row)) for row in alone]


def test_eos_ids_are_those_of_the_generation_config(model):
    free = generate(model, ids(PROMPT), eos_token_id=None)[0, 3:].tolist()
    model.generation_config.eos_token_id = [free[4], tiny.EOS_ID]
    assert generate(model, ids(PROMPT))[0, 3:].tolist() == free[: free.index(free[4]) + 1]


def test_the_mask_token_is_the_config_s_unless_given(model, ours):
    expected = refusion_eval.generate(ours, PROMPT, gen_length=16, mask_id=7, **EAGER).tokens
    assert generate(model, ids(PROMPT), mask_token_id=7)[0, 3:].tolist() == list(expected)
    del model.config.mask_token_id
    with pytest.raises(ConfigError, match="give mask_token_id"):
        generate(model, ids(PROMPT))
    assert generate(model, ids(PROMPT), mask_token_id=7)[0, 3:].tolist() == list(expected)


def test_sampling_follows_the_seed_or_torch(model, ours):
    expected = refusion_eval.generate(ours, PROMPT, gen_length=16, temperature=0.7, seed=4, **EAGER).tokens
    assert generate(model, ids(PROMPT), do_sample=True, temperature=0.7, seed=4)[0, 3:].tolist() == list(expected)

    def drawn(seed):
        torch.manual_seed(seed)
        return generate(model, ids(PROMPT), do_sample=True, num_return_sequences=2)

    assert drawn(0).equal(drawn(0))
    assert not drawn(0).equal(drawn(1))
    first, second = drawn(0).tolist()
    assert first != second
    assert generate(model, ids(PROMPT), do_sample=False, temperature=None).shape == (1, 19)


def test_other_decoders_are_reached_likewise(model, ours):
    expected = refusion_eval.generate(ours, PROMPT, "autoregressive", gen_length=9).tokens
    out = model.generate(ids(PROMPT), custom_generate=generate_with("autoregressive"), max_new_tokens=9)
    assert out[0, 3:].tolist() == list(expected)
    assert out.equal(model.generate(ids(PROMPT), max_new_tokens=9, do_sample=False))
    with pytest.raises(ConfigError, match="unknown"):
        generate_with("refuson")


def test_a_direct_call_is_the_same_and_suggests_names(model):
    assert refusion_generate(model, ids(PROMPT), max_new_tokens=16, **EAGER).equal(generate(model, ids(PROMPT)))
    file = io.StringIO()
    refusion_generate(model, ids(PROMPT), max_new_tokens=16, streamer=SlotStreamer(Words(), file), **EAGER)
    assert file.getvalue()
    with pytest.raises(ConfigError, match="did you mean tau_slot"):
        refusion_generate(model, ids(PROMPT), max_new_tokens=16, tau_slott=0.5)
    with pytest.raises(ValueError, match="tau_slott"):
        generate(model, ids(PROMPT), tau_slott=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gen_length": 8}, "called max_new_tokens"),
        ({"mask_id": 8}, "called mask_token_id"),
        ({"eos_ids": (8,)}, "called eos_token_id"),
        ({"block_size": 6}, "multiple of slot_size"),
        ({"mask_token_id": 61}, "vocabulary"),
        ({"max_new_tokens": 511}, "exceed the context of 512"),
        ({"num_beams": 2}, "beam_search"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"do_sample": True, "top_p": 0.5}, "TopPLogitsWarper"),
        ({"do_sample": True, "top_k": 7}, "TopKLogitsWarper"),
        ({"repetition_penalty": 1.2}, "RepetitionPenalty"),
        ({"max_time": 3.0}, "MaxTimeCriteria is not applied"),
        ({"position_ids": ids([2, 3, 4])}, "position_ids"),
        ({"attention_mask": ids([0, 0, 0])}, "prompt is empty"),
        (
            {"logits_processor": LogitsProcessorList([MinNewTokensLengthLogitsProcessor(1, 2, 3, device="cpu")])},
            "MinNewTokens",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(model, arguments, message):
    with pytest.raises(ConfigError, match=message):
        generate(model, ids(PROMPT), **arguments)


def test_other_models_are_refused():
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ConfigError, match="LlamaForCausalLM is not computed here; give a Qwen3ForCausalLM"):
        generate(LlamaForCausalLM(config), ids(PROMPT))


def test_variants_of_the_family_are_refused(tmp_path):
    model = tiny.save_checkpoint(tmp_path, attention_bias=True)
    with pytest.raises(CheckpointError, match=r"^the config of Qwen3ForCausalLM: attention_bias"):
        generate(model, ids(PROMPT))


def test_parameters_that_would_be_left_out_are_refused(model):
    projection = model.model.layers[1].self_attn.q_proj
    projection.lora = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"q_proj\.lora.*adapters"):
        generate(model, ids(PROMPT))
    del projection.lora
    model.model.norm.half()
    with pytest.raises(ConfigError, match=r"float16 and torch\.float32"):
        generate(model, ids(PROMPT))


def test_a_second_call_makes_nothing_anew(model):
    first = hosted(model)
    generate(model, ids(PROMPT))
    assert hosted(model) is first
    release(model)
    assert hosted(model) is not first


def test_weights_are_shared_where_layouts_allow():
    config = {"vocab_size": 99, "num_hidden_layers": 1, "num_key_value_heads": 2}
    module = Qwen3ForCausalLM(
        Qwen3Config(hidden_size=48, intermediate_size=80, num_attention_heads=4, head_dim=16, **config)
    ).to(torch.bfloat16)
    weights = hosted(module).engine.model.weights
    assert weights.embedding.data_ptr() == module.model.embed_tokens.weight.data_ptr()
    assert weights.head.data_ptr() == module.lm_head.weight.data_ptr()
    assert weights.layers[0].down.data_ptr() == module.model.layers[0].mlp.down_proj.weight.data_ptr()


def changed_in_place(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1)


def trained(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    model(ids([1, 2, 3, 4]), labels=ids([1, 2, 3, 4])).loss.backward()
    optimizer.step()


def loaded_anew(model):
    torch.manual_seed(5)
    model.load_state_dict({name: torch.randn_like(value) * 0.3 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [changed_in_place, trained, loaded_anew])
def test_changed_weights_are_seen(model, change, tmp_path):
    before = generate(model, ids(PROMPT))
    change(model)
    model.save_pretrained(tmp_path)
    expected = refusion_eval.generate(refusion_eval.load_model(tmp_path, device="cpu"), PROMPT, gen_length=16, **EAGER)
    after = generate(model, ids(PROMPT))
    assert after[0, 3:].tolist() == list(expected.tokens)
    assert not after.equal(before)


def test_a_cast_model_is_made_anew(model):
    first = hosted(model)
    assert hosted(model.to(torch.bfloat16)).dtype == torch.bfloat16
    assert hosted(model.to(torch.float32)) is not first


def test_changed_weights_leave_no_copies_of_the_old_ones(model):
    generate(model, ids(PROMPT))
    first = hosted(model)
    copies = weakref.ref(first.engine.model)
    changed_in_place(model)
    assert hosted(model) is not first
    gc.collect()
    assert copies() is None


def test_a_call_in_inference_mode_spoils_no_later_one(model):
    with torch.inference_mode():
        inside = generate(model, ids(PROMPT))
    assert inside.equal(generate(model, ids(PROMPT)))


def test_a_module_that_is_gone_takes_its_copies_along(directory):
    module = AutoModelForCausalLM.from_pretrained(directory)
    kept = weakref.ref(hosted(module))
    del module
    gc.collect()
    assert kept() is None


class Words:
    """A tokenizer with one word a token."""

    def decode(self, tokens, skip_special_tokens=False, **_):
        kept = [token for token in tokens if not (skip_special_tokens and token == tiny.EOS_ID)]
        return "".join(f"w{token} " for token in kept)


class Parts:
    """Keeps what a transformers streamer is given."""

    def __init__(self):
        self.parts, self.ended = [], 0

    def put(self, value):
        self.parts.append(value.reshape(-1).tolist())

    def end(self):
        self.ended += 1


class Watching(Parts):
    """A listener that keeps everything."""

    def __init__(self):
        super().__init__()
        self.updates, self.begun, self.kept = [], None, None

    def begin(self, num_positions):
        self.begun = num_positions

    def update(self, positions, tokens, final):
        self.updates.append((tuple(positions), tuple(tokens), final))

    def finish(self, tokens):
        self.kept = tuple(tokens)


@pytest.mark.parametrize("length", [13, 16])
def test_a_plain_streamer_gets_the_gapless_prefix(model, length):
    free = generate(model, ids(PROMPT), max_new_tokens=length, eos_token_id=None)[0, 3:].tolist()
    for eos in (None, next(token for token in free[5:] if token not in free[:5])):
        streamer = Parts()
        out = generate(model, ids(PROMPT), streamer=streamer, max_new_tokens=length, eos_token_id=eos)
        prompt, *parts = streamer.parts
        assert prompt == PROMPT
        assert len(parts) > 1
        assert list(chain(*parts)) == out[0, 3:].tolist()
        assert streamer.ended == 1


def test_a_text_streamer_works(model, capsys):
    out = generate(model, ids(PROMPT), streamer=TextStreamer(Words(), skip_prompt=True))
    assert capsys.readouterr().out == Words().decode(out[0, 3:].tolist()) + "\n"


def test_a_listener_is_told_every_event_and_changes_nothing(model):
    listener = Watching()
    alone = generate(model, ids(PROMPT), return_dict_in_generate=True)
    out = generate(model, ids(PROMPT), streamer=listener, max_new_tokens=14, return_dict_in_generate=True)
    assert (listener.begun, listener.kept, listener.ended) == (16, out.decoded[0].tokens, 1)
    assert type(out.decoded[0].trace) is Trace
    told = [
        (event.positions, event.tokens, event.tag == "fix")
        for event in out.decoded[0].trace.events
        if event.tag in ("draft", "fix")
    ]
    assert listener.updates == told
    assert out.decoded[0].trace.events[:-1] == alone.decoded[0].trace.events[:-1]


def test_a_streamer_takes_one_row_and_is_ended_even_so(model):
    streamer = Parts()
    with pytest.raises(ConfigError, match="one response, not 2"):
        generate(model, ids(PROMPT, PROMPT), streamer=streamer)
    assert streamer.ended == 1


def test_a_streamer_that_fails_ends_the_decoding(model):
    class Broken(Watching):
        def update(self, positions, tokens, final):
            raise BrokenPipeError("nobody listens")

    streamer = Broken()
    with pytest.raises(DecodeError, match="nobody listens"):
        generate(model, ids(PROMPT), streamer=streamer)
    assert streamer.ended == 1
    assert generate(model, ids(PROMPT)).shape == (1, 19)


def test_importing_the_package_does_not_import_this_part():
    code = "import sys, refusion_eval.api; sys.exit('refusion_eval.hf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
