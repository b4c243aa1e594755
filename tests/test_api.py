"""The Python interface: settings from the card, checks before any compute, and goldens through the front door."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import refusion_eval
from refusion_eval import api, loading
from refusion_eval.decoders import DECODERS
from refusion_eval.engine import engine
from refusion_eval.engine.width import SHIPPED_COSTS, WidthCost
from refusion_eval.errors import CheckpointError, ConfigError, DecodeError
from refusion_eval.models.card import checkpoint_card
from refusion_eval.runs import own_engine
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.system import System
from tests.models import tiny

SMALL = {"gen_length": 16, "slot_size": 4, "block_size": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny.save_checkpoint(directory)
    return refusion_eval.load_model(directory, device="cpu")


@pytest.fixture
def unloaded(model, monkeypatch):
    """The model with an engine that must not be touched."""

    class Untouchable:
        def __getattr__(self, name):
            raise AssertionError("something was computed before the arguments were checked")

    monkeypatch.setitem(vars(model), "engine", Untouchable())
    return model


def test_importing_the_package_loads_no_torch():
    code = "import sys, refusion_eval; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_lists_its_interface_and_has_it():
    assert set(refusion_eval.__all__) <= set(dir(refusion_eval))
    assert refusion_eval.decoder_settings is api.decoder_settings
    assert refusion_eval.generate_stream is api.generate_stream


def test_unknown_names_of_the_package_are_attribute_errors():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = refusion_eval.no_such_name


def test_the_checkpoints_of_the_package_have_names():
    folders = [api.load_model(name).directory.name for name in ("embedded", "embedded:llada")]
    assert folders == ["refusion", "llada"]
    with pytest.raises(ConfigError, match="no embedded checkpoint for nope, only for"):
        api.load_model("embedded:nope")


def test_a_loaded_model_says_what_it_is(model):
    assert (model.dtype, model.device.type, model.attention, model.revision) == (torch.float32, "cpu", "native", None)
    assert (model.card.mask_id, model.card.eos_ids) == (tiny.MASK_ID, (tiny.EOS_ID,))


def test_the_blocks_that_a_checkpoint_was_trained_with_are_the_default(tmp_path):
    tiny.save_checkpoint(tmp_path, family="sdar")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_token_id": tiny.MASK_ID, "block_size": 6}))
    model = api.LoadedModel.open(tmp_path)
    assert api.decoder_settings(model, "sdar").block_length == 6
    assert api.decoder_settings(model, "sdar", block_length=3).block_length == 3
    for loop, length in (("engine", 6), ("release", None)):  # the loop of a release has its own default
        args = parse_model_args({"pretrained": str(tmp_path), "decoder": "sdar", "loop": loop})
        assert System(args).checkpoint_settings.get("block_length") == length


def test_a_checkpoint_that_no_decoder_here_decodes_says_why(tmp_path):
    tiny.save_checkpoint(tmp_path)
    model = api.LoadedModel.open(tmp_path)
    model.card = checkpoint_card("Zigeng/DMax-16B", tmp_path)
    for decoder in ("llada2", "autoregressive"):
        with pytest.raises(ConfigError, match=r"embeddings between those of a token and of the mask.* --loop release"):
            api.decoder_settings(model, decoder)


def test_opening_needs_no_weights(tmp_path):
    tiny.save_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    opened = api.LoadedModel.open(tmp_path)
    assert opened.config.num_layers == 2
    with pytest.raises(CheckpointError, match="no weights"):
        _ = opened.engine


def test_mask_and_eos_come_from_the_card_unless_given(model):
    settings = api.decoder_settings(model, "refusion", **SMALL)
    assert (settings.mask_id, settings.eos_ids) == (tiny.MASK_ID, (tiny.EOS_ID,))
    assert api.decoder_settings(model, "refusion", mask_id=3, eos_ids=(4, 5), **SMALL).eos_ids == (4, 5)


@pytest.mark.parametrize("decoder", ["refusion", "autoregressive"])
def test_many_equals_one_by_one(model, decoder):
    settings = SMALL if decoder == "refusion" else {"gen_length": 16}
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]
    together = refusion_eval.generate_many(model, prompts, decoder, batch_size=3, **settings)
    alone = [refusion_eval.generate(model, prompt, decoder, **settings) for prompt in prompts]
    assert [out.tokens for out in together] == [out.tokens for out in alone]
    assert [out.num_forwards for out in together] == [out.num_forwards for out in alone]


def test_many_texts_are_asked_as_one_text_is_and_answered_in_text():
    model = refusion_eval.load_model("embedded", device="cpu")
    texts = ["What is 2 plus 3?", "Name a letter."]
    alone = [refusion_eval.generate(model, text, **SMALL) for text in texts]
    ids = model.tokenizer.encode(model.tokenizer.render_chat([{"role": "user", "content": texts[0]}]))
    together = refusion_eval.generate_many(model, [*texts, ids], **SMALL)
    assert [(out.tokens, out.text) for out in together[:2]] == [(out.tokens, out.text) for out in alone]
    assert [out.text for out in alone] == [model.tokenizer.decode(out.tokens) for out in alone]
    assert (together[2].tokens, together[2].text) == (alone[0].tokens, None)
    with pytest.raises(ConfigError, match="prompts is one text; give a list of texts, or call generate"):
        refusion_eval.generate_many(model, texts[0], **SMALL)


def test_numpy_and_tensor_prompts_are_taken(model):
    expected = refusion_eval.generate(model, [1, 2, 3], **SMALL).tokens
    assert refusion_eval.generate(model, torch.tensor([1, 2, 3]), **SMALL).tokens == expected
    assert refusion_eval.generate(model, torch.tensor([1, 2, 3]).numpy(), **SMALL).tokens == expected


IDS = [1, 2, 3]


@pytest.mark.parametrize(
    "prompt",
    [
        torch.tensor([IDS]),
        np.array([IDS], dtype=np.uint16),
        [IDS],
        (IDS,),
        [torch.tensor(IDS)],
        [torch.tensor(token) for token in IDS],
        [np.int64(token) for token in IDS],
        range(1, 4),
    ],
)
def test_prompts_are_taken_as_transformers_makes_them(model, prompt):
    expected = refusion_eval.generate(model, IDS, **SMALL).tokens
    assert refusion_eval.generate(model, prompt, **SMALL).tokens == expected
    assert [out.tokens for out in refusion_eval.generate_many(model, [prompt, IDS], **SMALL)] == [expected, expected]
    assert api.score_tokens(model, prompt, prompt) == api.score_tokens(model, IDS, IDS)


def test_a_single_id_and_an_iterator_are_prompts(model):
    single, expected = (refusion_eval.generate(model, prompt, **SMALL) for prompt in (torch.tensor(1), [1]))
    assert single.tokens == expected.tokens
    (out,) = refusion_eval.generate_many(model, [iter(IDS)], **SMALL)
    assert out.tokens == refusion_eval.generate(model, IDS, **SMALL).tokens


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"a text", "of the type bytes"),
        (None, "of the type NoneType"),
        (5, "of the type int"),
        ({"input_ids": IDS}, "of the type dict; give its input_ids"),
        (["a"], "token id 'a' is not an integer"),
        ([5.7], "token id 5.7 is not an integer"),
        ([True], "token id True is not an integer"),
        (torch.tensor([1.0, 2.0]), "token id 1.0 is not an integer"),
        ([torch.tensor(1.5)], "is not an integer"),
        (torch.tensor([IDS, IDS]), "token ids are 2 rows"),
        ([torch.tensor(IDS), torch.tensor(IDS)], "token ids are 2 rows"),
        (torch.empty(0), "prompt is empty"),
    ],
)
def test_what_is_no_row_of_token_ids_is_refused(unloaded, prompt, message):
    with pytest.raises(ConfigError, match=message):
        refusion_eval.generate(unloaded, prompt, **SMALL)
    with pytest.raises(ConfigError, match=rf"prompt 1 \(from 0\): .*{message}"):
        refusion_eval.generate_many(unloaded, [IDS, prompt], **SMALL)
    with pytest.raises(ConfigError, match="token"):
        api.score_tokens(unloaded, prompt, IDS)


@pytest.mark.parametrize("eos_ids", [[5, 4], torch.tensor([5, 4]), np.array([5, 4]), (5, np.int32(4)), "5,4"])
def test_end_tokens_are_a_tuple_whatever_they_came_as(unloaded, eos_ids):
    settings = api.decoder_settings(unloaded, "refusion", eos_ids=eos_ids, **SMALL)
    assert settings.eos_ids == (5, 4)
    assert {type(token) for token in settings.eos_ids} == {int}


def test_a_request_that_is_refused_ends_no_other(model):
    settings = api.decoder_settings(model, "refusion", **SMALL)
    requests = [
        ("refusion", IDS, settings),
        ("refusion", [1.5], settings),
        ("refuson", IDS, settings),
        ("refusion", IDS, {"gen_length": 8}),
        ("refusion", IDS, settings),
    ]
    results = dict(api.generate_stream(model, requests, batch_size=2))
    assert results[0].tokens == results[4].tokens == refusion_eval.generate(model, IDS, **SMALL).tokens
    refusals = ["token id 1.5 is not an integer", "did you mean refusion", "make them with decoder_settings"]
    for index, message in enumerate(refusals, start=1):
        assert isinstance(results[index], DecodeError)
        assert message in str(results[index])


def test_the_results_of_other_prompts_survive_one_that_fails(model, monkeypatch):
    decode = DECODERS["refusion"].decode

    def failing_at_four(prompt, settings, trace):
        if len(prompt) == 4:
            raise ZeroDivisionError("on purpose")
        return (yield from decode(prompt, settings, trace))

    prompts = [[1, 2, 3], [1, 2, 3, 4], [5], [6, 7, 8, 9]]
    expected = [refusion_eval.generate(model, prompt, **SMALL).tokens for prompt in prompts]
    monkeypatch.setitem(api.DECODERS, "refusion", dataclasses.replace(DECODERS["refusion"], decode=failing_at_four))
    with pytest.raises(DecodeError, match=r"^2 of 4 prompts .*, the first of them number 1 ") as caught:
        refusion_eval.generate_many(model, prompts, batch_size=2, **SMALL)
    results = caught.value.results
    assert [isinstance(result, DecodeError) for result in results] == [False, True, False, True]
    assert [results[index].tokens for index in (0, 2)] == [expected[0], expected[2]]


@pytest.mark.parametrize(
    ("prompt", "decoder", "settings", "message"),
    [
        ([1], "refuson", {}, "did you mean refusion"),
        ([1], "refusion", {"gen_lenght": 8}, "did you mean gen_length"),
        ([1], "autoregressive", {"tau_slot": 0.5}, "unknown setting 'tau_slot'"),
        ([1], "refusion", {"gen_length": 0}, "gen_length"),
        ([1], "refusion", {"mask_id": 61}, "vocabulary"),
        ([1], "autoregressive", {"eos_ids": (99,)}, "vocabulary"),
        ([], "autoregressive", {"gen_length": 8}, "prompt is empty"),
        ([1, 61], "autoregressive", {"gen_length": 8}, "token 61 lies outside"),
        ([-2], "autoregressive", {"gen_length": 8}, "token -2 lies outside"),
        ([1], "autoregressive", {"gen_length": 512}, "exceed the context of 512"),
        ([1] * 500, "refusion", {**SMALL, "gen_length": 13}, "exceed the context of 512"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_computed(unloaded, prompt, decoder, settings, message):
    with pytest.raises(ConfigError, match=message):
        refusion_eval.generate(unloaded, prompt, decoder, **settings)
    with pytest.raises(ConfigError, match=message):
        refusion_eval.generate_many(unloaded, [[1], prompt], decoder, **settings)


def test_the_last_position_of_the_context_is_usable(model):
    out = refusion_eval.generate(model, [1] * 500, "autoregressive", gen_length=12, eos_ids=())
    assert len(out.tokens) == 12


@pytest.mark.parametrize(
    ("decoder", "chosen", "longest"),
    [
        ("sdar", {"block_length": 32}, 12),
        ("sdar", {"block_length": 24}, 4),  # 21 blocks of 24 are 504
        ("sdar", {"block_length": 4, "remasking_strategy": "low_confidence_dynamic", "draft_steps": 0}, 12),
        ("autoregressive", {}, 12),
    ],
)
def test_what_fits_into_the_context_is_decoded_and_the_longest_response_is_named(tmp_path, decoder, chosen, longest):
    tiny.save_checkpoint(tmp_path, family="sdar", max_position_embeddings=512)
    model = api.load_model(tmp_path, device="cpu")
    prompt = [1] * 500
    out = refusion_eval.generate(model, prompt, decoder, gen_length=longest, eos_ids=(), **chosen)
    assert len(out.tokens) == longest
    for more in (1, 40):
        with pytest.raises(ConfigError, match=f"context of 512; shorten the prompt, or lower gen_length to {longest}$"):
            refusion_eval.generate(model, prompt, decoder, gen_length=longest + more, eos_ids=(), **chosen)
    with pytest.raises(ConfigError, match=r"context of 512; shorten the prompt$"):
        refusion_eval.generate(model, [1] * 512, decoder, gen_length=4, **chosen)


def test_batch_size_must_be_positive(unloaded):
    with pytest.raises(ConfigError, match="batch_size=0"):
        refusion_eval.generate_many(unloaded, [[1]], batch_size=0, **SMALL)


def test_a_decoder_that_needs_a_mask_token_is_refused_without_one(tmp_path):
    tiny.save_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["mask_token_id"]
    path.write_text(json.dumps(config))
    opened = api.LoadedModel.open(tmp_path)
    with pytest.raises(ConfigError, match=r"does not fit decoder=refusion: it has no mask token; it fits auto"):
        refusion_eval.generate(opened, [1], **SMALL)
    assert api.decoder_settings(opened, "refusion", mask_id=3, **SMALL).mask_id == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"device": "meta"}, "device='meta'"),
        ({"device": "cuda:99"}, "CUDA devices"),
        ({"attention": "eager"}, "attention='eager'"),
    ],
)
def test_unknown_or_impossible_load_arguments(model, arguments, message):
    with pytest.raises(ConfigError, match=message):
        refusion_eval.load_model(model.name, **arguments)


def test_scores_of_continuations(model):
    greedy = refusion_eval.generate(model, [1, 2, 3], "autoregressive", gen_length=5, eos_ids=()).tokens
    assert api.score_tokens(model, [1, 2, 3], greedy).is_greedy
    (first, second) = api.score_tokens_many(model, [([1, 2, 3], greedy), ([4], [5])])
    assert first.is_greedy
    assert second.log_prob < 0


def test_the_last_token_of_a_scored_text_takes_no_position(model):
    assert api.score_tokens(model, [1] * 512, [2]).log_prob < 0


@pytest.mark.parametrize(("prefix", "continuation"), [([], [1]), ([1], []), ([1], [61]), ([1] * 500, [1] * 14)])
def test_texts_that_cannot_be_scored_are_refused(unloaded, prefix, continuation):
    with pytest.raises(ConfigError):
        api.score_tokens(unloaded, prefix, continuation)


def golden_cases(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_autoregressive_goldens(shared):
    folder = shared / "parity" / "baselines"
    for case in golden_cases(folder / "golden_ar.jsonl"):
        model = refusion_eval.load_model(folder / "checkpoints" / case["checkpoint"], device="cpu")
        eos_ids = model.card.eos_ids if case["settings"]["stop_ids"] == "eos" else (189, 190)
        gen_length = case["settings"]["max_new_tokens"]
        out = refusion_eval.generate(
            model, case["prompt_ids"], "autoregressive", gen_length=gen_length, eos_ids=eos_ids
        )
        assert (list(out.tokens), out.num_forwards) == (case["output_ids"], case["num_forwards"]), case["id"]


@pytest.mark.parametrize("fuse", [False, True])
def test_refusion_goldens_in_a_batch(shared, fuse):
    cases = golden_cases(shared / "parity" / "golden.jsonl")[::9]
    model = refusion_eval.load_model(shared / "parity" / "tiny", device="cpu")
    requests = []
    for case in cases:
        given = case["settings"]
        settings = api.decoder_settings(
            model,
            "refusion",
            gen_length=given["gen_length"],
            slot_size=given["slot_size"],
            block_size=case["block_size"],
            tau_slot=given["slot_threshold"],
            tau_token=given["token_threshold"],
            fuse=fuse,
            row_cost=0.0,
        )
        requests.append(("refusion", case["prompt_ids"], settings))
    for index, out in api.generate_stream(model, requests, batch_size=8):
        expected = cases[index]["fixed"]
        assert list(out.tokens) == expected["output_ids"], index
        assert fuse or out.num_forwards == expected["n_forward"], index


def test_what_the_device_decides_is_measured_only_where_it_is_left_open(model):
    def never():
        raise AssertionError("measured for nothing")

    settings = api.decoder_settings(model, "refusion", fuse=True, **SMALL)
    filled = api.with_width_cost(settings, lambda: WidthCost(free_rows=5, row_cost=0.5))
    assert (filled.free_rows, filled.row_cost) == (5, 0.5)
    assert api.with_width_cost(filled, never) is filled
    plain = api.decoder_settings(model, "refusion", fuse=False, **SMALL)
    assert api.with_width_cost(plain, never) is plain
    greedy = api.decoder_settings(model, "autoregressive", gen_length=4)
    assert api.with_width_cost(greedy, never) is greedy


def test_the_cost_of_rows_is_shipped_and_measured_only_where_asked(checkpoint, monkeypatch):
    monkeypatch.setattr(loading, "measure", lambda *args: WidthCost(7, 0.5))
    shipped, tuned = (refusion_eval.load_model(checkpoint, device="cpu", tune=tune) for tune in (False, True))
    assert shipped.width_cost == SHIPPED_COSTS["cpu"]
    assert tuned.width_cost == WidthCost(7, 0.5)


def test_settings_are_made_once_and_travel_as_they_are(model):
    settings = api.decoder_settings(model, "refusion", **SMALL)
    assert api.decoder_settings(model, "refusion", settings) is settings
    with pytest.raises(ConfigError, match="give fields, or one RefusionSettings"):
        api.decoder_settings(model, "refusion", settings, gen_length=8)
    with pytest.raises(ConfigError, match="give fields, or one AutoregressiveSettings"):
        api.decoder_settings(model, "autoregressive", settings)
    with pytest.raises(ConfigError, match="must lie in the vocabulary"):
        api.decoder_settings(model, "refusion", dataclasses.replace(settings, mask_id=10**6))


def test_an_unknown_option_of_a_checkpoint_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="load_model: unknown key 'dtyp'; did you mean dtype"):
        refusion_eval.load_model(checkpoint, dtyp="float32")
    with pytest.raises(ConfigError, match="load_model: dtype='int8'; choose one of auto, float32"):
        refusion_eval.load_model(checkpoint, dtype="int8")


def test_graphs_are_refused_where_there_is_no_gpu(checkpoint):
    with pytest.raises(ConfigError, match="cuda_graphs needs a CUDA device, not cpu"):
        refusion_eval.load_model(checkpoint, device="cpu", cuda_graphs=True)


@pytest.mark.parametrize(
    ("capability", "options", "graphs", "dtype"),
    [
        ((7, 5), {}, False, torch.float16),
        ((7, 0), {"dtype": "bfloat16"}, False, torch.bfloat16),
        ((7, 5), {"dtype": "float32", "cuda_graphs": True}, True, torch.float32),
        ((8, 0), {}, True, torch.bfloat16),
        ((9, 0), {"cuda_graphs": False}, False, torch.bfloat16),
    ],
)
def test_old_gpus_record_no_forwards_and_compute_in_float16(monkeypatch, caplog, capability, options, graphs, dtype):
    monkeypatch.setattr(loading, "choose_device", lambda _name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla T4")
    with caplog.at_level("INFO"):
        model = api.LoadedModel.open("embedded", device="cuda", **options)
    assert (model.cuda_graphs, model.dtype) == (graphs, dtype)
    is_said = capability < (8, 0) and not options.get("cuda_graphs")
    lines = [line for line in caplog.messages if "recorded" in line]
    assert lines == ["Tesla T4: forwards are not recorded on compute capability below 8.0"] * is_said


@pytest.mark.parametrize(
    ("checkpoint_name", "decoder", "fits"),
    [
        ("llada_1", "dream", "llada, fast_dllm_llada, d2f_llada"),
        ("llada_1", "autoregressive", "llada, fast_dllm_llada, d2f_llada"),
        ("dream_1", "llada", "dream, fast_dllm_dream, d2f_dream"),
        ("qwen3_1", "dream", "refusion, autoregressive, bd3lm, esolm, llada"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused_with_the_decoders_that_fit(shared, checkpoint_name, decoder, fits):
    opened = api.LoadedModel.open(str(shared / "parity" / "baselines" / "checkpoints" / checkpoint_name))
    with pytest.raises(ConfigError, match=rf"does not fit decoder={decoder}; it fits {fits}[a-z0-9_, ]*: take one"):
        api.decoder_settings(opened, decoder)


def test_a_mask_id_says_that_a_causal_checkpoint_was_trained_with_masks(shared):
    opened = api.LoadedModel.open(str(shared / "parity" / "baselines" / "checkpoints" / "qwen3_1"))
    opened.card = dataclasses.replace(opened.card, mask_id=None, decoders=("autoregressive",))
    assert api.decoder_settings(opened, "llada", mask_id=5).mask_id == 5
    with pytest.raises(ConfigError, match="does not fit decoder=dream"):
        api.decoder_settings(opened, "dream", mask_id=5)


@pytest.fixture
def two_threads(monkeypatch):
    """Torch computes with two threads, as nobody chose."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(loading, "DEFAULT_THREADS", 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("environment", "chosen", "threads"),
    [({}, 0, 1), ({"OMP_NUM_THREADS": ""}, 0, 1), ({"OMP_NUM_THREADS": "2"}, 0, 2), ({}, 3, 3)],
)
def test_a_small_model_computes_with_one_thread_unless_somebody_chose(environment, chosen, threads, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(chosen or 2)
    assert loading.LoadedModel.open("embedded", device="cpu").num_threads == threads


@pytest.mark.usefixtures("two_threads")
def test_a_small_model_leaves_the_threads_of_the_process_to_other_models(monkeypatch):
    used, compute = [], engine.hidden_of
    monkeypatch.setattr(engine, "hidden_of", lambda *given: (used.append(torch.get_num_threads()), compute(*given))[1])
    small = api.load_model("embedded", device="cpu")
    monkeypatch.setattr(loading, "ONE_THREAD_BYTES", 0)  # from here on every model is a large one
    large = api.load_model("embedded:autoregressive", device="cpu")
    for model, threads in ((small, 1), (large, 2), (small, 1)):
        used.clear()
        api.generate(model, [1, 2], decoder="autoregressive", gen_length=2)
        api.score_tokens(model, [1], [2])
        assert (model.num_threads, set(used), torch.get_num_threads()) == (threads, {threads}, 2)


def test_the_bandwidth_of_a_record_is_that_of_the_threads_of_the_model(monkeypatch):
    threads = []
    monkeypatch.setattr(own_engine, "copy_bandwidth", lambda device: threads.append(torch.get_num_threads()) or 1.0)
    embedded = refusion_eval.load_model("embedded", device="cpu")
    monkeypatch.setattr(embedded, "_imposed_threads", 3)
    args = parse_model_args({"pretrained": "embedded"})
    assert own_engine.OwnEngine(System(args), embedded).roofline()["copy_bytes_per_second"] == 1.0
    assert (threads, embedded.num_threads) == ([3], 3)
    assert torch.get_num_threads() != 3


def test_a_text_is_asked_as_the_users_turn_and_answered_as_a_text():
    embedded = refusion_eval.load_model("embedded", device="cpu")
    turn = embedded.tokenizer.render_chat([{"role": "user", "content": "How many?"}])
    by_text, by_ids = (
        refusion_eval.generate(embedded, prompt, gen_length=16, slot_size=4, block_size=8)
        for prompt in ("How many?", embedded.tokenizer.encode(turn))
    )
    assert by_text.tokens == by_ids.tokens
    assert by_text.text == embedded.tokenizer.decode(by_ids.tokens)
    assert by_ids.text is None
