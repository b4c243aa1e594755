"""A rendered chat gets no token added by any door; plain prompts keep what the tokenizer is made to add."""

from pathlib import Path

import pytest

from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.system import System
from tests.models.chat_layouts import CHAT, DOORS, LAYOUTS, by_transformers, save

ADDING = {name: layout for name, layout in LAYOUTS.items() if layout.adds != "$A"}


@pytest.fixture(scope="module", params=LAYOUTS)
def saved(request, tmp_path_factory) -> Path:
    return save(LAYOUTS[request.param], tmp_path_factory.mktemp("layout") / "checkpoint")


def test_every_door_gives_a_chat_the_token_ids_of_transformers(saved):
    expected = by_transformers(saved)
    assert {name: door(saved) for name, door in DOORS.items()} == dict.fromkeys(DOORS, expected)


@pytest.mark.parametrize("name", ADDING)
def test_a_plain_prompt_gets_what_the_tokenizer_adds_unless_it_begins_with_bos(name, tmp_path):
    layout = LAYOUTS[name]
    tokenizer = Tokenizer(save(layout, tmp_path / "checkpoint"))
    plain, bare = tokenizer.encode("two words", plain=True), tokenizer.encode("two words")
    assert plain == tokenizer.inner.encode("two words") != bare
    if layout.bos:
        assert tokenizer.encode(f"{layout.bos}two", plain=True) == tokenizer.encode(f"{layout.bos}two")


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.bos])
def test_add_bos_token_puts_one_in_front_of_a_chat_once(name, tmp_path):
    folder = str(save(LAYOUTS[name], tmp_path / "checkpoint"))
    system = System(parse_model_args({"pretrained": folder, "decoder": "autoregressive", "add_bos_token": True}))
    ids = system.encode(system.render(CHAT), plain=False)
    assert ids[0] == system.model.tokenizer.inner.bos_token_id != ids[1]
    assert ids[-5:] == by_transformers(Path(folder))[-5:]
