"""config.json and its neighbours: shapes, mask id and EOS ids, and what is refused."""

import json
from dataclasses import replace

import pytest

from refusion_eval.decoders import fitting_decoders
from refusion_eval.errors import CheckpointError
from refusion_eval.models.card import CARDS, checkpoint_card
from refusion_eval.models.checkpoint import model_config
from tests.models import tiny


@pytest.fixture
def directory(tmp_path):
    tiny.save_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    return tmp_path


def change(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_rotary_base_is_found_in_either_layout(directory):
    assert model_config(directory).rope_theta == 5000.0
    change(directory, rope_parameters=None, rope_theta=70.0)
    assert model_config(directory).rope_theta == 70.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rotary scaling 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "rotary scaling 'linear'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_key_value_heads": 3}, "multiple of 3"),
    ],
)
def test_what_is_not_computed_is_refused(directory, changes, message):
    change(directory, **changes)
    with pytest.raises(CheckpointError, match=message):
        model_config(directory)


def test_missing_and_broken_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an object"):
        model_config(tmp_path)


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 9], (7, 9)), (None, ())])
def test_eos_may_be_one_id_a_list_or_absent(directory, value, ids):
    change(directory, eos_token_id=value)
    assert checkpoint_card("local", directory).eos_ids == ids


def test_generation_config_decides_over_config_about_eos(directory):
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert checkpoint_card("local", directory).eos_ids == (3, 4)


def test_mask_id_comes_from_the_config_first(directory):
    assert checkpoint_card("local", directory).mask_id == tiny.MASK_ID


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"41": {"content": "<|mask|>"}}}),
        (
            "tokenizer_config.json",
            {"mask_token": {"content": "[M]"}, "added_tokens_decoder": {"41": {"content": "[M]"}}},
        ),
        ("tokenizer.json", {"added_tokens": [{"id": 41, "content": "<|mask|>"}]}),
    ],
)
def test_mask_id_is_found_in_the_tokenizer_files(directory, name, content):
    change(directory, mask_token_id=None)
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / name).write_text(json.dumps(content))
    assert checkpoint_card("local", directory).mask_id == 41


def test_a_checkpoint_without_a_mask_token_decodes_autoregressively_only(directory):
    change(directory, mask_token_id=None)
    card = checkpoint_card("local", directory)
    assert card.mask_id is None
    assert (card.kind, card.decoders) == ("causal", ())
    assert fitting_decoders(card.kind) == ("autoregressive",)


@pytest.mark.parametrize("family", ["llada", "Dream"])
def test_a_family_of_masked_models_names_its_own_decoders(directory, family):
    change(directory, model_type=family)
    names = [f"{name}{family.lower()}" for name in ("", "fast_dllm_", "d2f_", "d3llm_")]
    assert fitting_decoders(checkpoint_card("local", directory).kind) == tuple(names)


@pytest.mark.parametrize(
    ("family", "decoders"),
    [
        ("sdar", ("sdar", "idlm", "autoregressive")),
        ("wedlm", ("wedlm", "autoregressive")),
        ("Fast_dLLM_Qwen", ("fast_dllm_v2",)),
        ("llada2", ("llada2",)),
        ("a2d-qwen3", ("llada", "bd3lm")),
    ],
)
def test_a_model_type_of_one_method_names_its_decoders(directory, family, decoders):
    change(directory, model_type=family)
    card = checkpoint_card("local", directory)
    assert fitting_decoders(card.kind, card.decoders) == decoders
    change(directory, decoders=["esolm"])
    card = checkpoint_card("local", directory)
    assert fitting_decoders(card.kind, card.decoders) == ("esolm",)


@pytest.mark.parametrize(("family", "size"), [("sdar", 8), ("sdar_moe", 8), ("qwen3", None), ("Fast_dLLM_Qwen", None)])
def test_the_blocks_of_sdar_are_those_that_its_config_says(directory, family, size):
    change(directory, model_type=family, block_size=8)
    assert checkpoint_card("local", directory).sizes.get("block_length") == size
    assert checkpoint_card("JetLM/SDAR-4B-Chat", directory).sizes.get("block_length") == size


def test_the_expand_token_of_dreamon_is_that_of_its_config(directory):
    change(directory, model_type="Dream", expand_token_id=31)
    for name in ("local", "Dream-org/DreamOn-v0-7B"):
        assert checkpoint_card(name, directory).settings["expand_id"] == 31
    change(directory, expand_token_id="31")
    with pytest.raises(CheckpointError, match=r"expand_token_id is .* must be a token id"):
        checkpoint_card("local", directory)
    change(directory, expand_token_id=None)
    assert "expand_id" not in checkpoint_card("local", directory).settings


def test_dream_with_blocks_is_dream_reasoner(directory):
    change(directory, model_type="Dream", block_size=32, mask_token_id=33)
    for name in ("/models/copy", "Dream-org/DreamReasoner-8B"):
        card = checkpoint_card(name, directory)
        assert (card.decoders, card.sizes["block_length"], card.kind) == (("sdar",), 32, "masked")
    assert model_config(directory).family_layout.qk_norm
    change(directory, block_size=None)
    assert checkpoint_card("/models/copy", directory).kind == "dream"


@pytest.mark.parametrize("size", [0, "8", True])
def test_a_block_size_that_is_none_is_refused(directory, size):
    change(directory, model_type="sdar", block_size=size)
    with pytest.raises(CheckpointError, match=f"block_size is {size!r}; it must be a positive whole number"):
        checkpoint_card("local", directory)


def test_a_copy_of_fast_dllm_v2_has_the_mask_that_its_code_has(directory):
    change(directory, **CARDS["Efficient-Large-Model/Fast_dLLM_v2_7B"].shape, mask_token_id=None)
    card = checkpoint_card("local", directory)
    assert (card.mask_id, card.eos_ids, card.backbone) == (151665, (151645,), "Qwen2.5-7B")


def test_a_causal_model_with_a_mask_token_may_name_its_decoders(directory):
    card = checkpoint_card("local", directory)
    fitting = ("refusion", "autoregressive", "bd3lm", "esolm", "llada")
    assert fitting_decoders(card.kind, card.decoders)[:5] == fitting
    change(directory, decoders=["bd3lm"])
    card = checkpoint_card("local", directory)
    assert fitting_decoders(card.kind, card.decoders) == ("bd3lm",)


@pytest.mark.parametrize("decoders", ["bd3lm", [1], [""], {"bd3lm": 1}])
def test_decoders_are_a_list_of_names(directory, decoders):
    change(directory, decoders=decoders)
    with pytest.raises(CheckpointError, match=r"decoders is .* must be a list"):
        checkpoint_card("local", directory)


def test_decoders_of_a_fine_tune_go_before_those_of_its_shape(directory):
    shape = CARDS["GSAI-ML/LLaDA-8B-Base"].shape
    change(directory, mask_token_id=126336, decoders=["llada"], **shape)
    assert checkpoint_card("local", directory).decoders == ("llada",)


def test_cards_of_one_shape_say_the_same():
    """Else a local copy would be taken for the wrong one."""
    by_shape = {}
    for card in CARDS.values():
        if card.shape:
            by_shape.setdefault(json.dumps(card.shape, sort_keys=True), []).append(replace(card, name=""))
    assert all(card == cards[0] for cards in by_shape.values() for card in cards)


def test_a_known_checkpoint_has_its_card(directory):
    assert checkpoint_card("GSAI-ML/ReFusion", directory) == CARDS["GSAI-ML/ReFusion"]


@pytest.mark.parametrize("known", [name for name, card in CARDS.items() if card.shape])
def test_a_local_copy_of_a_known_checkpoint_is_recognised_by_its_shape(directory, known):
    change(directory, backbone=None, mask_token_id=CARDS[known].mask_id, **CARDS[known].shape)
    assert checkpoint_card("/models/copy", directory) == replace(CARDS[known], name="/models/copy")
    change(directory, backbone="another")
    assert checkpoint_card("/models/copy", directory).backbone == "another"


@pytest.mark.parametrize(
    ("known", "decoders"),
    [
        ("yifanyu/I-DLM-8B", ("idlm", "autoregressive")),
        ("JetLM/SDAR-8B-Chat", ("sdar", "autoregressive")),
        ("tencent/WeDLM-8B-Instruct", ("wedlm", "autoregressive")),
        ("ByteDance-Seed/Stable-DiffCoder-8B-Instruct", ("sdar",)),
        ("dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1", ("bd3lm",)),
    ],
)
def test_a_name_tells_what_an_architecture_leaves_open(directory, known, decoders):
    change(directory, model_type="sdar", mask_token_id=CARDS[known].mask_id)
    card = checkpoint_card(known, directory)
    assert fitting_decoders(card.kind, card.decoders) == decoders


@pytest.mark.parametrize("name", ["tencent/WeDLM-8B-Instruct", "/models/copy"])
def test_the_files_say_which_mask_a_known_checkpoint_has_where_its_card_does_not(directory, name):
    change(directory, **CARDS["tencent/WeDLM-8B-Instruct"].shape, mask_token_id=33, eos_token_id=151643, backbone=None)
    card = checkpoint_card(name, directory)
    assert (card.mask_id, card.eos_ids) == (33, (151645, 151643))


def test_seed_coder_is_no_copy_of_the_diffusion_model_made_from_it(directory):
    shape = CARDS["ByteDance-Seed/Stable-DiffCoder-8B-Base"].shape
    change(directory, **shape | {"architectures": ["LlamaForCausalLM"]}, mask_token_id=None, backbone=None)
    assert checkpoint_card("/models/seed-coder", directory).kind == "causal"


def test_a_fine_tune_with_a_mask_token_of_its_own_is_no_copy(directory):
    change(directory, mask_token_id=151670, **CARDS["Qwen/Qwen3-8B"].shape)
    card = checkpoint_card("/models/fine-tune", directory)
    assert card.mask_id == 151670
    assert (card.kind, card.decoders) == ("masked", ())


def test_an_architecture_says_what_its_checkpoints_are_for_unless_they_say_it(directory):
    change(directory, model_type="wedlm", mask_token_id=7, eos_token_id=5, backbone=None)
    card = checkpoint_card("/models/wedlm", directory)
    assert (card.mask_id, card.eos_ids, card.kind, card.decoders) == (7, (5,), "masked", ("wedlm", "autoregressive"))
    change(directory, decoders=["bd3lm"])
    assert checkpoint_card("/models/wedlm", directory).decoders == ("bd3lm",)


@pytest.mark.parametrize(("attention_bias", "qk_norm"), [(True, False), (False, True)])
def test_wedlm_says_whether_its_layout_is_that_of_qwen2_or_qwen3(directory, attention_bias, qk_norm):
    change(directory, model_type="wedlm", attention_bias=attention_bias, qk_norm=qk_norm)
    layout = model_config(directory).family_layout
    assert (layout.qkv_bias, layout.qk_norm) == (attention_bias, qk_norm)
