import hashlib
import logging
import re

import pytest
import yaml

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError
from refusion_eval.paths import tasks_path
from refusion_eval.runs.settings_tables import Generation, load_table, read_generation_kwargs, resolve

REFUSION = DECODERS["refusion"].Settings
CHECKPOINT = {"mask_id": 299, "eos_ids": (297,)}
DIGEST_OF_0_1_0 = "c535b06456b92496"
NOTHING = Generation({}, ())


def table_in(tmp_path, **benchmarks):
    content = {"source": "a test", "decoder": "refusion", "benchmarks": benchmarks}
    (tmp_path / "refusion.yaml").write_text(yaml.safe_dump(content))
    return load_table(tmp_path, "refusion", False, REFUSION, CHECKPOINT)


FOLDER = tasks_path() / "settings"
TABLES = [
    (decoder, mini, preset)
    for decoder in sorted(DECODERS)
    for mini in (False, True)
    for preset in yaml.safe_load((FOLDER / f"{'mini_' * mini}{decoder}.yaml").read_text()).get("presets", [None])
]


def shipped(decoder, mini, preset=None):
    settings_type = DECODERS[decoder].Settings
    checkpoint = {key: value for key, value in CHECKPOINT.items() if key in settings_type.__dataclass_fields__}
    return load_table(FOLDER, decoder, mini, settings_type, checkpoint, preset)


@pytest.mark.parametrize(("decoder", "mini", "preset"), TABLES)
def test_the_shipped_tables_cover_all_benchmarks_and_name_their_sources(decoder, mini, preset):
    table = shipped(decoder, mini, preset)
    assert table.benchmarks.keys() == table.sources.keys()
    assert set(table.benchmarks) == {
        name for name, one in BENCHMARKS.items() if (one.has_mini if mini else one.in_paper)
    }
    assert table.label.partition(":")[2] == (preset or "")
    assert all(table.sources.values())


def test_the_first_preset_is_taken_if_none_is_named_and_labels_say_which():
    table = shipped("llada", False)
    assert table.label == "tasks/settings/llada.yaml:official"
    assert shipped("llada", False, "paper_implied").benchmarks["gsm8k"] == {"gen_length": 256, "block_length": 8}


def test_a_preset_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"llada.yaml: unknown preset 'oficial'; did you mean official"):
        shipped("llada", False, "oficial")
    with pytest.raises(ConfigError, match=r"refusion.yaml has no presets, so leave out preset=official"):
        shipped("refusion", False, "official")


def test_a_table_of_ones_own_is_a_file_whose_name_and_hash_are_recorded(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("decoder: refusion\nbenchmarks:\n  gsm8k: {slot_size: 8, block_size: 32}\n")
    for mini in (False, True):
        table = load_table(FOLDER, "refusion", mini, REFUSION, CHECKPOINT, str(path))
        assert table.benchmarks == {"gsm8k": {"slot_size": 8, "block_size": 32}}
        assert table.label == f"mine.yaml@{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
        assert table.sources == {"gsm8k": "mine.yaml"}
    common = {"settings_type": REFUSION, "model_args": {}, "generation": NOTHING, "table": table}
    assert resolve("mini_gsm8k", checkpoint=CHECKPOINT, **common).sources["slot_size"] == f"{table.label}:gsm8k"
    with pytest.raises(ConfigError, match=r"mine\.yaml@\w+: has no row for math; add it .* leave out task mini_math"):
        resolve("mini_math", checkpoint=CHECKPOINT, **common)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"mine\.yaml: there is no such file"),
        ("decoder: llada\nbenchmarks: {gsm8k: {steps: 4}}\n", "has to say `decoder: refusion`"),
        ("decoder: refusion\nbenchmarks: {gsm9k: {}}\n", "unknown key 'gsm9k'; did you mean gsm8k"),
        (
            "decoder: refusion\nbenchmarks: {gsm8k: {slot_sise: 4}}\n",
            "gsm8k: unknown key 'slot_sise'; did you mean slot_size",
        ),
    ],
)
def test_a_wrong_table_of_ones_own_is_refused_by_its_place(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_table(FOLDER, "refusion", False, REFUSION, CHECKPOINT, str(path))


def test_a_setting_that_was_added_later_is_recorded_only_where_it_is_used():
    def digest(**settings):
        return resolve(
            "t", REFUSION, model_args=settings, generation=Generation({}, ("Q:",)), table=None, checkpoint=CHECKPOINT
        )

    before, used = digest(order="confidence", serial="false"), digest(order="random")
    assert before.digest == digest().digest == DIGEST_OF_0_1_0
    assert not {"order", "serial"} & before.values.keys()
    assert (used.values["order"], used.sources["order"]) == ("random", "model_args")
    assert used.digest != before.digest


def test_rows_outrank_what_is_common_and_every_row_has_a_source(tmp_path):
    rows = {"gsm8k": {"gen_length": 64}, "math": {"gen_length": 64, "tau_slot": 0.5, "source": "elsewhere"}}
    content = {"decoder": "refusion", "source": "a test", "common": {"tau_slot": 0.9}, "benchmarks": rows}
    (tmp_path / "refusion.yaml").write_text(yaml.safe_dump(content))
    table = load_table(tmp_path, "refusion", False, REFUSION, CHECKPOINT)
    assert table.benchmarks["gsm8k"] == {"gen_length": 64, "tau_slot": 0.9}
    assert table.benchmarks["math"] == {"gen_length": 64, "tau_slot": 0.5}
    assert table.sources == {"gsm8k": "a test", "math": "elsewhere"}
    del content["source"]
    (tmp_path / "refusion.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="gsm8k needs a source"):
        load_table(tmp_path, "refusion", False, REFUSION, CHECKPOINT)


def test_a_table_for_other_blocks_than_those_of_the_checkpoint_is_said(caplog):
    folder, tokens = tasks_path() / "settings", {"mask_id": 9, "eos_ids": (1,)}
    for size in (4, None):
        load_table(folder, "sdar", False, DECODERS["sdar"].Settings, tokens | ({"block_length": size} if size else {}))
    assert not caplog.records
    table = load_table(folder, "sdar", False, DECODERS["sdar"].Settings, tokens | {"block_length": 32})
    assert table.benchmarks["gsm8k"]["block_length"] == 4
    assert "sdar.yaml:official: block_length 4, but config.json says block_size 32; give --set" in caplog.text


def test_published_table_6_equals_the_shipped_one(reference_data):
    rows = (reference_data / "published" / "table6_hyperparameters.csv").read_text().split()
    names = {"ARC-C": "arc_challenge"}
    columns = rows[0].split(",")[1:]
    published = {}
    for row in rows[1:]:
        task, *values = row.split(",")
        published[names.get(task, task.lower().replace("-", "_"))] = dict(zip(columns, map(float, values), strict=True))
    table = load_table(tasks_path() / "settings", "refusion", False, REFUSION, CHECKPOINT)
    assert table.benchmarks == published


def test_precedence_and_the_source_of_every_key(tmp_path):
    table = table_in(tmp_path, gsm8k={"gen_length": 512, "slot_size": 32, "block_size": 128, "tau_slot": 0.9})
    resolved = resolve(
        "gsm8k_cot",
        REFUSION,
        model_args={"tau_slot": 0.7},
        generation=Generation({"gen_length": 256, "tau_slot": 0.8}, ("Q:",)),
        table=table,
        checkpoint=CHECKPOINT,
    )
    assert (resolved.settings.gen_length, resolved.settings.slot_size, resolved.settings.tau_slot) == (256, 32, 0.7)
    assert resolved.until == ("Q:",)
    assert resolved.sources["tau_slot"] == "model_args"
    assert resolved.sources["gen_length"] == "generation_kwargs"
    assert resolved.sources["slot_size"] == "tasks/settings/refusion.yaml:gsm8k"
    assert resolved.sources["mask_id"] == "checkpoint"
    assert resolved.sources["tau_token"] == "default"
    assert resolved.sources.keys() == resolved.values.keys()


def test_a_task_of_no_benchmark_gets_the_defaults(tmp_path):
    table = table_in(tmp_path, gsm8k={"gen_length": 64})
    resolved = resolve("hellaswag", REFUSION, model_args={}, generation=NOTHING, table=table, checkpoint=CHECKPOINT)
    assert resolved.settings == REFUSION(**CHECKPOINT)


def test_a_benchmark_without_a_row_has_that_of_its_likeness_and_says_so(tmp_path):
    def slot_size(**rows):
        common = {"model_args": {}, "generation": NOTHING, "checkpoint": CHECKPOINT}
        resolved = resolve("refusion_math_500", REFUSION, table=table_in(tmp_path, **rows), **common)
        return resolved.settings.slot_size, resolved.sources["slot_size"].rpartition(":")[2]

    assert slot_size(math={"slot_size": 8}) == (8, "math")
    assert slot_size(math={"slot_size": 8}, math_500={"slot_size": 4}) == (4, "math_500")


def test_answers_of_ifeval_may_have_the_length_of_lm_evals_task(tmp_path):
    def length(**rows):
        common = {"model_args": {}, "generation": NOTHING, "checkpoint": CHECKPOINT}
        resolved = resolve("refusion_ifeval", REFUSION, table=table_in(tmp_path, **rows), **common)
        return resolved.settings.gen_length, resolved.sources["gen_length"].rpartition(":")[2]

    assert length(gsm8k={"gen_length": 512}) == (1280, "benchmark ifeval")
    assert length(gsm8k={"gen_length": 2048}) == (2048, "gsm8k")
    assert length(gsm8k={"gen_length": 512}, ifeval={"gen_length": 256}) == (256, "ifeval")


@pytest.mark.parametrize(("decoder", "mini", "preset"), [table for table in TABLES if not table[1]])
def test_every_benchmark_can_be_decoded_with_every_shipped_table(decoder, mini, preset):
    table, settings_type = shipped(decoder, mini, preset), DECODERS[decoder].Settings
    checkpoint = {key: value for key, value in CHECKPOINT.items() if key in settings_type.__dataclass_fields__}
    common = {"model_args": {}, "generation": NOTHING, "checkpoint": checkpoint, "table": table}
    for benchmark in BENCHMARKS.values():
        if benchmark.source is not None:
            resolve(f"refusion_{benchmark.name}", settings_type, **common)


def test_a_response_of_one_block_stays_one_where_a_benchmark_makes_it_longer():
    common = {"model_args": {}, "generation": NOTHING, "checkpoint": {"mask_id": 299, "eos_ids": (297,)}}
    resolved = resolve("refusion_ifeval", DECODERS["llada"].Settings, table=shipped("llada", False), **common)
    assert (resolved.settings.gen_length, resolved.settings.block_length) == (1280, 1280)
    assert resolved.sources["block_length"] == "benchmark ifeval"


def test_digest_changes_with_settings_and_with_stop_strings(tmp_path):
    def digest(gen_length, until):
        generation = Generation({"gen_length": gen_length}, until)
        return resolve("x", REFUSION, model_args={}, generation=generation, table=None, checkpoint=CHECKPOINT).digest

    assert len({digest(64, ()), digest(64, ("\n",)), digest(65, ())}) == 3
    assert digest(64, ("\n",)) == digest(64, ("\n",))


def test_contradicting_values_name_each_source(tmp_path):
    table = table_in(tmp_path, gsm8k={"block_size": 8, "slot_size": 8})
    with pytest.raises(
        ConfigError, match=r"task gsm8k .*block_size=8 from tasks/settings/.*slot_size=32 from model_args"
    ):
        resolve("gsm8k", REFUSION, model_args={"slot_size": 32}, generation=NOTHING, table=table, checkpoint=CHECKPOINT)


@pytest.mark.parametrize(
    ("benchmarks", "message"),
    [
        ({"gsm8k": {"slot_size": 32, "block_size": 48}}, "refusion.yaml: gsm8k: .*block_size"),
        ({"gsm8k": {"slotsize": 32}}, "refusion.yaml: gsm8k: unknown key 'slotsize'; did you mean slot_size"),
        ({"gsm9k": {}}, "refusion.yaml: unknown key 'gsm9k'; did you mean gsm8k"),
        ({"gsm8k": {"tau_slot": "high"}}, "refusion.yaml: gsm8k: tau_slot='high' is not a number"),
    ],
)
def test_a_wrong_table_names_file_benchmark_and_key(tmp_path, benchmarks, message):
    with pytest.raises(ConfigError, match=message):
        table_in(tmp_path, **benchmarks)


@pytest.mark.parametrize(
    "name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens", "gen_length"]
)
def test_every_name_of_the_length_becomes_gen_length(name):
    assert read_generation_kwargs({name: 100.0}, REFUSION, "x").values["gen_length"] == 100


@pytest.mark.parametrize(
    ("kwargs", "temperature"),
    [
        ({}, None),
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"do_sample": True}, 1.0),
    ],
)
def test_sampling_follows_lm_eval(kwargs, temperature):
    assert read_generation_kwargs(kwargs, REFUSION, "x").values.get("temperature") == temperature


def test_a_temperature_without_effect_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        read_generation_kwargs({"do_sample": False, "temperature": 0.7}, REFUSION, "gsm8k")
    assert "temperature=0.7 has no effect" in caplog.text


@pytest.mark.parametrize(
    ("until", "expected"), [(None, ()), ([], ()), ("Q:", ("Q:",)), (["Q:", "", "</s>"], ("Q:", "</s>"))]
)
def test_stop_strings_come_in_any_form(until, expected):
    assert read_generation_kwargs({"until": until}, REFUSION, "x").until == expected


def test_neutral_values_of_unsupported_keys_pass_and_others_do_not():
    assert read_generation_kwargs({"top_p": 1.0, "num_beams": 1}, REFUSION, "x").values == {}
    with pytest.raises(ConfigError, match=r"x: top_p=0.9 cannot be obeyed"):
        read_generation_kwargs({"top_p": 0.9}, REFUSION, "x")


def test_unknown_generation_argument_is_an_error():
    with pytest.raises(ConfigError, match="generation_kwargs: unknown key 'tau_slots'; did you mean tau_slot"):
        read_generation_kwargs({"tau_slots": 0.9}, REFUSION, "gsm8k")


def test_the_log_names_settings_once_and_no_defaults():
    def resolved(until, **values):
        return resolve(
            "t", REFUSION, model_args=values, generation=Generation({}, until), table=None, checkpoint=CHECKPOINT
        )

    first, same, other = resolved(("Q:",), tau_slot=0.5), resolved(("Q:",), tau_slot=0.5), resolved((), tau_slot=0.7)
    assert "tau_slot=0.5 [model_args]" in first.describe()
    assert first.describe().endswith("stop at ['Q:']")
    assert "[default]" not in first.describe()
    assert re.search(r"\bslot_size=\d+ .*\[default\]", first.describe(with_defaults=True))
    assert same.describe(first) == "as before"
    assert other.describe(first) == "tau_slot=0.7 [model_args]; stop at []"
