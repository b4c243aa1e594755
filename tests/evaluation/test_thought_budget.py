"""Runs of a checkpoint with a template of thoughts: records and tables of a budget."""

import pytest

from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.loop import evaluate
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.tables import summary, summary_table
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.store.run_store import RunReader

# As the embedded checkpoints' own, with an open thought at the end.
TEMPLATE = """
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}{{- '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
{#- Thoughts end with </think>. -#}"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "think.jinja").write_text(TEMPLATE)

    def evaluated(name, limit=2, decoder="autoregressive", **more):
        given = {
            "pretrained": "embedded",
            "decoder": decoder,
            "gen_length": 12,
            "thought_budget": 4,
            "warmup": 0,
            **more,
        }
        template = {"chat_template": str(tmp_path / "think.jinja"), "run_dir": str(tmp_path / name)}
        assert evaluate(parse_model_args(template | given), ["mini_gsm8k"], limit=limit).is_complete
        with RunReader.open(tmp_path / name) as reader:
            return list(reader.samples())

    return evaluated


def test_the_thought_ends_at_its_budget_and_forced_tokens_are_recorded_and_in_no_speed(run, tmp_path):
    samples = run("run")
    for sample in samples:
        before, after = sample.text.split("\n</think>\n\n")
        assert before
        assert after
        assert sample.num_forced_tokens == sample.num_tokens - 12 > 0
        assert sample.num_forwards == sample.num_decoded == 12
        assert sample.num_thought_tokens == 4 + sample.num_forced_tokens - len("\n\n")
        assert not sample.cut_in_thought
    rows = {row.metric: row.value for row in run_measurements([tmp_path / "run"])}
    assert (rows["tpf"], rows["tokens_mean"], rows["ended_by_budget"], rows["cut_in_thought"]) == (1, 12, 100, 0)
    assert rows["tpf_canvas"] == 1
    assert rows["thought_tokens_mean"] + rows["answer_tokens_mean"] == 12 + samples[0].num_forced_tokens
    table = summary_table(summary(run_measurements([tmp_path / "run"])))
    columns = ("Thought tokens", "Answer tokens", "Cut in thought %", "Ended by budget %")
    assert table.columns[-4:] == columns
    assert "Ended by budget: texts whose thought was ended after thought_budget tokens" in table.notes[0]


def test_a_budget_of_nothing_leaves_the_answer_alone(run):
    (sample,) = run("run", limit=1, thought_budget=0)
    assert sample.text.startswith("\n</think>\n\n")
    assert (sample.num_decoded, sample.num_forwards) == (12, 12)


def test_an_ample_budget_records_what_no_budget_does(run):
    plain, ample = run("plain", thought_budget="none"), run("ample", thought_budget=12)
    assert [sample.tokens for sample in plain] == [sample.tokens for sample in ample]
    assert [sample.num_forced_tokens for sample in (*plain, *ample)] == [None] * 4
    assert all(sample.cut_in_thought for sample in ample)


def test_transformers_own_loop_takes_no_budget_and_says_so(tmp_path):
    given = {
        "pretrained": "embedded",
        "decoder": "autoregressive",
        "loop": "generate",
        "run_dir": str(tmp_path / "run"),
    }
    message = "mini_gsm8k: thought_budget=4 is for this project's own engine, and loop=generate ends no thoughts; leave"
    with pytest.raises(ConfigError, match=message):
        evaluate(parse_model_args(given | {"thought_budget": 4}), ["mini_gsm8k"], limit=1)


@pytest.mark.parametrize(
    ("decoder", "more"), [("autoregressive", {"temperature": 1.0}), ("refusion", {"slot_size": 2, "block_size": 4})]
)
def test_a_batch_and_a_continued_run_give_the_same_texts(run, decoder, more):
    whole = run("whole", decoder=decoder, limit=3, **more)
    run("parts", decoder=decoder, limit=1, **more)
    parts = run("parts", decoder=decoder, limit=3, batch_size=3, **more)
    assert [sample.tokens for sample in parts] == [sample.tokens for sample in whole]
    assert all(sample.num_forced_tokens for sample in parts)
