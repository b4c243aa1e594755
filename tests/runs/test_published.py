"""The published systems: what they are called, and what they run."""

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.decoders import DECODERS, fitting_decoders
from refusion_eval.errors import ConfigError
from refusion_eval.models.cards import CARDS
from refusion_eval.runs.published import published_system, published_systems, system_arguments


def test_every_decoder_has_a_system_and_every_known_checkpoint_fits_its_decoder():
    systems = published_systems()
    assert {system.decoder for system in systems.values()} == DECODERS.keys()
    for system in systems.values():
        if system.pretrained in CARDS:
            assert system.decoder in fitting_decoders(CARDS[system.pretrained].kind)


def test_the_labels_are_those_of_the_papers_first_table(reference_data):
    rows = (reference_data / "published" / "table1.csv").read_text().splitlines()[1:]
    labels = {system.label for system in published_systems().values()}
    assert {row.split(",")[1] for row in rows} <= labels


def test_a_checkpoint_of_ones_own_leaves_the_published_adapter_out():
    published = system_arguments("d2f_llada", None)
    assert published["pretrained"] == "GSAI-ML/LLaDA-8B-Instruct"
    assert published["adapter"] == "SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora"
    own = system_arguments("d2f_llada", "some/merged")
    assert (own["pretrained"], own["adapter"], own["decoder"]) == ("some/merged", None, "d2f_llada")


def test_an_unknown_system_is_refused_with_the_likeliest_one():
    with pytest.raises(ConfigError, match="unknown system 'fast_dlm_llada'; did you mean fast_dllm_llada"):
        published_system("fast_dlm_llada")
    with pytest.raises(ConfigError, match="bd3lm: no checkpoint of it was published; give one with --model"):
        system_arguments("bd3lm", None)


def test_the_command_lists_them():
    listed = CliRunner().invoke(app, ["systems"])
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(published_systems())
