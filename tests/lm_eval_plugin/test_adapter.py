import math
import sys

import pytest
import torch
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from refusion_eval.benchmarks import get_task
from refusion_eval.benchmarks.rows import WITHHELD, Sealing
from refusion_eval.engine.engine import Engine
from refusion_eval.errors import ConfigError, DecodeError, StoreError
from refusion_eval.lm_eval_plugin.adapter import RefusionLM, observe
from refusion_eval.runs.job import Detokenizer
from refusion_eval.store.run_store import RunReader
from tests.models.tiny import save_word_tokenizer

GENERATION = {"gen_length": 16, "slot_size": 4, "block_size": 8}


@pytest.fixture(scope="session")
def tiny(checkpoint):
    return checkpoint


@pytest.fixture(scope="session")
def prompts(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    turns = [[{"role": "user", "content": row["question"]}] for row in get_task("mini_gsm8k").rows()[:6]]
    return [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]


def build(checkpoint, **arguments):
    return RefusionLM.create_from_arg_obj({"pretrained": checkpoint, "warmup": 0, **GENERATION, **arguments})


def asked(prompts, task="gsm8k", **generation_kwargs):
    return [
        Instance("generate_until", {"question": prompt}, (prompt, generation_kwargs), 0, (task, number, 1))
        for number, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="session")
def responses(tiny, prompts):
    return build(tiny).generate_until(asked(prompts))


def stored(run_dir):
    with RunReader.open(run_dir) as run:
        return list(run.samples())


def test_a_model_that_nobody_holds_any_more_lets_go_of_its_run_directory(tiny, prompts, tmp_path):
    lm = build(tiny, run_dir=str(tmp_path))
    lm.generate_until(asked(prompts[:1]))
    del lm
    again = build(tiny, run_dir=str(tmp_path))
    again.generate_until(asked(prompts[:2]))
    again.close()
    assert len(stored(tmp_path)) == 2


def test_one_text_for_each_request_in_order(responses, prompts, tiny):
    lm = build(tiny)
    assert lm.generate_until(list(reversed(asked(prompts)))) == list(reversed(responses))
    assert len(responses) == len(prompts)
    assert any(responses)


def test_batch_size_does_not_change_a_text(responses, prompts, tiny):
    assert build(tiny, batch_size=4).generate_until(asked(prompts)) == responses


def test_the_first_documents_of_each_task_are_decoded_alone_if_asked(responses, prompts, tiny, tmp_path):
    lm = build(tiny, run_dir=str(tmp_path), batch_size="auto", tps_samples=2, warmup=1)
    requests = [*asked(prompts), *asked(prompts[:1]), *asked(prompts[:3], task="gsm8k_cot")]
    assert lm.generate_until(requests) == [*responses, responses[0], *responses[:3]]
    lm.close()
    alone = [(s.key.task, s.item_id, s.key.sample) for s in stored(tmp_path) if s.batch_size == 1]
    assert alone == [("gsm8k", "0", 0), ("gsm8k", "1", 0), ("gsm8k_cot", "0", 0), ("gsm8k_cot", "1", 0)]
    assert all(sample.warm == (sample.batch_size == 1) for sample in stored(tmp_path))
    assert {sample.batch_size for sample in stored(tmp_path)} == {1, 16}


def test_in_rounds_so_many_items_of_the_task_are_decoded_alone_and_not_of_each_round(prompts, tiny, tmp_path):
    lm = build(tiny, run_dir=str(tmp_path), batch_size=2, tps_samples=1)
    for items in (range(0, 4, 2), range(1, 4, 2)):
        lm.begin_evaluation({"gsm8k": "1"}, {"gsm8k": items}, Sealing())
        lm.generate_until(asked([prompts[item] for item in items]))
    lm.close()
    assert [sample.item_id for sample in stored(tmp_path) if sample.batch_size == 1] == ["0"]


def test_a_batch_that_runs_out_of_memory_goes_on_with_half_of_it(responses, prompts, tiny, tmp_path, monkeypatch):
    compute = Engine._compute

    def compute_few(self, cache, forwards, sequences):
        if len(forwards) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory, by design")
        return compute(self, cache, forwards, sequences)

    monkeypatch.setattr(Engine, "_compute", compute_few)
    lm = build(tiny, run_dir=str(tmp_path), batch_size=5)
    assert lm.generate_until(asked(prompts)) == responses
    lm.close()
    assert {sample.batch_size for sample in stored(tmp_path)} == {2}


def test_a_stop_string_cuts_the_text_and_nothing_else(responses, prompts, tiny):
    stop = max(responses, key=len)[2]
    cut = build(tiny).generate_until(asked(prompts, until=[stop]))
    assert cut == [text.split(stop)[0] for text in responses]


def test_every_sample_is_recorded_with_settings_and_their_sources(responses, prompts, tiny, tmp_path):
    build(tiny, run_dir=str(tmp_path)).generate_until(asked(prompts, until=["zzz"], temperature=0))
    samples = stored(tmp_path)
    assert sorted(sample.text for sample in samples) == sorted(responses)
    for sample in samples:
        assert (sample.benchmark, sample.key.task, sample.batch_size) == ("gsm8k", "gsm8k", 1)
        assert sample.num_tokens == len(sample.tokens) <= 16
        assert sample.num_forwards == sum(event[0] == "forward" for event in sample.trace)
        assert sample.seconds > 0
        assert sample.settings["tau_slot"] == 0.9
        assert sample.settings["until"] == ["zzz"]
        assert sample.settings_source["tau_slot"] == "tasks/settings/refusion.yaml:gsm8k"
        assert sample.settings_source["slot_size"] == "model_args"
        assert sample.settings_source["temperature"] == "generation_kwargs"
        assert sample.settings_source["mask_id"] == "checkpoint"


def test_a_second_run_serves_what_the_first_recorded(responses, prompts, tiny, tmp_path, monkeypatch):
    first = build(tiny, run_dir=str(tmp_path))
    first.generate_until(asked(prompts[:3]))
    first.close()
    second = build(tiny, run_dir=str(tmp_path))
    decoded = []
    run = second.system.run
    monkeypatch.setattr(second.system, "run", lambda jobs: (decoded.extend(jobs), run(decoded))[1])
    assert second.generate_until(asked(prompts)) == responses
    assert len(decoded) == len(prompts) - 3


def test_another_system_in_the_same_directory_is_refused(prompts, tiny, tmp_path):
    first = build(tiny, run_dir=str(tmp_path))
    first.generate_until(asked(prompts[:1]))
    first.close()
    with pytest.raises(StoreError, match="tau_slot"):
        build(tiny, run_dir=str(tmp_path), tau_slot=0.1).generate_until(asked(prompts[:1]))


@pytest.fixture
def failing(monkeypatch):
    """Makes the engine fail at every prompt that is longer than a given number of tokens."""

    def fail_beyond(num_tokens):
        run = Engine.run

        def run_or_fail(engine, decode, prompt, settings):
            if len(prompt) > num_tokens:
                raise DecodeError("made to fail")
            return run(engine, decode, prompt, settings)

        monkeypatch.setattr(Engine, "run", run_or_fail)

    return fail_beyond


def test_a_failed_sample_is_recorded_as_error_ends_the_run_and_is_retried(prompts, tiny, tmp_path, failing):
    requests = asked([prompts[0], prompts[1] * 4])
    lm = build(tiny, run_dir=str(tmp_path))
    failing(max(len(lm.tok_encode(prompts[0])), len(lm.tok_encode(prompts[1]))))
    with pytest.raises(DecodeError, match=r"1 of 2 samples could not be decoded; the others are in .*; run again"):
        lm.generate_until(requests)
    lm.close()
    errors = [sample.error for sample in stored(tmp_path)]
    assert sorted(error is None for error in errors) == [False, True]
    assert "made to fail" in next(error for error in errors if error)
    retry = build(tiny, run_dir=str(tmp_path))
    with pytest.raises(DecodeError, match="1 of 2"):
        retry.generate_until(requests)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_prompt_that_is_too_long_is_refused_before_anything_is_decoded(prompts, tiny, tmp_path, batch_size):
    lm = build(tiny, run_dir=str(tmp_path), batch_size=batch_size)
    with pytest.raises(ConfigError, match=r"^gsm8k item 1: prompt of \d+ tokens .* shorten the prompt.*nothing was"):
        lm.generate_until(asked([prompts[0], prompts[1] * 4000]))
    lm.close()
    assert stored(tmp_path) == []


def test_several_prompts_that_are_too_long_are_one_error(prompts, tiny):
    with pytest.raises(ConfigError, match=r"gsm8k item 0: .*\(2 of 3 prompts are refused; this is the first\)"):
        build(tiny).generate_until(asked([prompts[0] * 4000, prompts[0], prompts[1] * 4000]))


def test_samples_of_one_item_differ_when_drawn_and_repeat_when_run_again(prompts, tiny):
    requests = asked(prompts[:1], do_sample=True, temperature=5.0) * 4
    drawn = build(tiny, seed=1).generate_until(requests)
    assert len(set(drawn)) > 1
    assert build(tiny, seed=1).generate_until(requests) == drawn
    assert build(tiny, seed=2).generate_until(requests) != drawn


def test_greedy_samples_of_one_item_are_equal(responses, prompts, tiny):
    assert build(tiny).generate_until(asked(prompts[:1]) * 3) == [responses[0]] * 3


def test_sealed_questions_stay_out_of_the_record(tiny, tmp_path):
    question = "which of these nine plain words would be quoted verbatim by a model"
    lm, sealing = build(tiny, run_dir=str(tmp_path)), Sealing()
    lm.begin_evaluation({}, {}, sealing)
    lm.generate_until(asked([f"Q: {sealing.seal('gpqa/1/question', question)}"], task="refusion_gpqa"))
    (sample,) = stored(tmp_path)
    assert sample.tokens is None
    assert sample.num_tokens > 0
    assert {token for tag, *rest in sample.trace if tag in ("fix", "draft") for token in rest[2]} == {0}
    assert question.encode() not in b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())


EXAMPLE = "an earlier question which stands in the prompt as an example of nine words"
STOCK_GPQA = {
    "Question": "which of these nine plain words would be quoted verbatim by a model",
    "choice1": "the first choice is long enough to be recognised when it is quoted",
    "choice2": "short",
    "answer": "(A)",
}


@pytest.mark.parametrize("task", ["gpqa_main_cot_zeroshot", "gpqa_diamond_generative_n_shot", "my_gpqa"])
def test_questions_of_gpqa_tasks_that_seal_nothing_stay_out_of_the_record(tiny, tmp_path, monkeypatch, task):
    quoted = f"{EXAMPLE}. {STOCK_GPQA['Question']}: {STOCK_GPQA['choice1']}. The answer is (A)."
    monkeypatch.setattr(Detokenizer, "text", lambda *_: quoted)
    prompt = (
        f"Question: {EXAMPLE}\nAnswer: (B)\n\nQuestion: {STOCK_GPQA['Question']}\nChoices:\n"
        f"(A) {STOCK_GPQA['choice1']}\n(B) {STOCK_GPQA['choice2']}\nAnswer:"
    )
    lm = build(tiny, run_dir=str(tmp_path))
    texts = lm.generate_until([Instance("generate_until", STOCK_GPQA, (prompt, {}), 0, (task, 0, 1))])
    (sample,) = stored(tmp_path)
    assert sample.text == texts[0] == f"{WITHHELD}. {WITHHELD}: {WITHHELD}. The answer is (A)."
    assert sample.tokens is None
    assert {token for tag, *rest in sample.trace if tag in ("fix", "draft") for token in rest[2]} == {0}


def test_other_tasks_and_the_synthetic_look_alike_are_recorded_in_full(prompts, tiny, tmp_path):
    lm = build(tiny, run_dir=str(tmp_path))
    lm.generate_until([*asked(prompts[:1], task="mini_gpqa"), *asked(prompts[:1], task="mmlu_pro")])
    assert all(sample.tokens for sample in stored(tmp_path))


def test_lm_evals_own_cache_is_filled_sample_by_sample(responses, prompts, tiny, tmp_path):
    lm = build(tiny)
    cached = CachingLM(lm, str(tmp_path / "cache.db"))
    seen = []
    add = lm.cache_hook.add_partial
    lm.cache_hook.add_partial = lambda *partial: (seen.append(partial[2]), add(*partial))
    assert cached.generate_until(asked(prompts)) == responses
    assert seen == responses


def test_both_entry_points_build_the_same(tiny):
    text = f"pretrained={tiny},tau_slot=1,gen_length=8.0"
    assert (
        RefusionLM.create_from_arg_string(text).args
        == RefusionLM.create_from_arg_obj({"pretrained": tiny, "tau_slot": 1, "gen_length": 8.0}).args
    )


def test_nothing_is_loaded_before_the_first_request(tiny):
    assert "model" not in build(tiny).system.__dict__


def test_chat_template_is_the_checkpoints_own_and_leaves_a_prefix_open(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    user = [{"role": "user", "content": "hello"}]
    prefixed = [*user, {"role": "assistant", "content": "The answer"}]
    lm = build(tiny)
    expected = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
    assert lm.apply_chat_template(user) == expected
    assert lm.apply_chat_template(prefixed, add_generation_prompt=False).endswith("The answer")


def test_a_chat_model_without_its_template_is_warned_about(prompts, tiny, caplog):
    build(tiny).generate_until(asked(prompts[:1]))
    assert "--apply_chat_template" in caplog.text


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory):
    """Other shapes than the reference checkpoint's: grouped heads, a head of its own, random weights, no mask token."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("random")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_word_tokenizer(folder, num_words=97)
    return str(folder)


def test_log_likelihood_of_a_random_model_equals_transformers(random_checkpoint):
    model = AutoModelForCausalLM.from_pretrained(random_checkpoint, dtype=torch.float32)
    lm = RefusionLM.create_from_arg_obj({"pretrained": random_checkpoint, "decoder": "autoregressive"})
    pairs = [("w5 w9 w44", " w7"), ("w2", " w3 w4 w5 w6"), ("", "w10 w11"), (" ".join(["w8 w9"] * 70), " w3 w2")]
    found = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0, ("x", 0, 1)) for pair in pairs])
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        wanted = lm.tok_encode(continuation)
        # A text beyond the model's range loses its beginning.
        given = (lm.tok_encode(context) or [lm.prefix_token_id])[
            -(lm.system.model.config.max_positions + 1 - len(wanted)) :
        ]
        expected, expected_greedy = reference_log_likelihood(model, given, wanted)
        assert math.isclose(value, expected, rel_tol=1e-4, abs_tol=1e-4)
        assert greedy == expected_greedy


def test_a_checkpoint_without_mask_token_needs_the_other_decoder(random_checkpoint, prompts):
    with pytest.raises(ConfigError, match=r"has no mask token; it fits autoregressive: take"):
        build(random_checkpoint).generate_until(asked(prompts[:1]))


def reference_log_likelihood(model, context, continuation):
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation])).logits[0].double().log_softmax(-1)
    rows = logits[len(context) - 1 : -1]
    total = sum(row[token].item() for row, token in zip(rows, continuation, strict=True))
    return total, rows.argmax(-1).tolist() == continuation


@pytest.mark.parametrize("batch_size", [1, 3])
def test_log_likelihood_equals_transformers(tiny, prompts, batch_size):
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    pairs = [(prompt, prompts[number - 1][:20]) for number, prompt in enumerate(prompts)]
    requests = [Instance("loglikelihood", {}, pair, 0, ("x", 0, 1)) for pair in pairs]
    found = build(tiny, batch_size=batch_size).loglikelihood(requests)
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        given = tokenizer.encode(context.rstrip())
        both = tokenizer.encode(context + continuation)
        expected, expected_greedy = reference_log_likelihood(model, given, both[len(given) :])
        assert math.isclose(value, expected, rel_tol=1e-4, abs_tol=1e-4)
        assert greedy == expected_greedy


def test_rolling_log_likelihood_scores_every_token_once(tiny, prompts):
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    lm = build(tiny)
    text = prompts[0]
    tokens = lm.tok_encode(text)
    (found,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0, ("x", 0, 1))])
    expected, _ = reference_log_likelihood(model, [lm.prefix_token_id], tokens)
    assert math.isclose(found, expected, rel_tol=1e-4)


def test_unknown_argument_of_a_task_stops_before_decoding(prompts, tiny):
    with pytest.raises(ConfigError, match="did you mean tau_slot"):
        build(tiny).generate_until(asked(prompts, tau_slt=0.5))


@pytest.mark.parametrize(
    ("command", "in_one_line"), [("bin/lm_eval", True), ("lm_eval/__main__.py", True), ("my_program.py", False)]
)
def test_an_error_of_lm_evals_command_is_one_line(command, in_one_line, tiny, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [command])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ConfigError) as refusal:
        RefusionLM.create_from_arg_obj({"pretrained": str(tiny), "slot_sise": 8})
    sys.excepthook(ConfigError, refusal.value, refusal.value.__traceback__)
    said = capsys.readouterr().err
    assert "did you mean slot_size?" in said
    assert (said == f"error: {refusal.value}\n") == in_one_line
    assert ("Traceback" in said) != in_one_line


def test_git_says_nothing_outside_a_repository(tmp_path, monkeypatch, capfd):
    observe()
    monkeypatch.chdir(tmp_path)
    assert evaluator.get_git_commit_hash() is None
    assert capfd.readouterr().err == ""
