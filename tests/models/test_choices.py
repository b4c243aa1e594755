"""Tables of kernels that were measured to be faster (`refusion_eval.models.choices`)."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from refusion_eval.errors import ConfigError
from refusion_eval.models import choices
from refusion_eval.models.choices import NO_CHOICES, Choices, Product, Sizes, Switches, choices_for, read_choices
from tests.engine.fake_cuda import shape_8b

OWN = {"kernel": "dot", "block_n": 32, "block_k": 128, "splits": 2}
ROW = OWN | {"kernel": "row"}


def tables():
    sizes = Sizes.of(shape_8b(1), torch.bfloat16)
    products = {"out": {16: Product(**OWN), 40: Product(padded_to=64)}, "gate_up": {8: Product(padded_to=16)}}
    table = Choices(device="NVIDIA H300", sizes=sizes, products=products, switches={16: Switches(joins=True)})
    return table, replace(table, skipped=(8,), sizes=replace(sizes, hidden_size=2048))


def test_a_table_is_read_as_it_was_written_and_serves_its_card_and_sizes_alone(tmp_path, monkeypatch):
    path = tmp_path / "h300" / "choices.json"
    path.parent.mkdir()
    path.write_text(choices.choices_text(tables()))
    assert read_choices(path) == tables()
    monkeypatch.setattr(choices, "shipped_files", lambda: [path])
    config = shape_8b(1)
    found = {}
    for name in ("NVIDIA H300", "NVIDIA H300 NVL", ""):
        monkeypatch.setattr(choices, "card_name", lambda device, name=name: name)
        found[name] = choices_for(torch.device("cpu"), config, torch.bfloat16)
    assert found == {"NVIDIA H300": tables()[0], "NVIDIA H300 NVL": NO_CHOICES, "": NO_CHOICES}
    monkeypatch.setattr(choices, "card_name", lambda device: "NVIDIA H300")
    assert choices_for(torch.device("cpu"), config, torch.float16) is NO_CHOICES
    assert choices_for(torch.device("cpu"), replace(config, hidden_size=2048), torch.bfloat16) == tables()[1]


def test_a_damaged_file_stops_its_own_card_alone(tmp_path, monkeypatch, caplog):
    good, bad = (tmp_path / name / "choices.json" for name in ("h300", "h100"))
    for path in (good, bad):
        path.parent.mkdir()
    good.write_text(choices.choices_text(tables()))
    bad.write_text('[{"device": "NVIDIA H100"')
    monkeypatch.setattr(choices, "shipped_files", lambda: [bad, good])
    monkeypatch.setattr(choices, "card_name", lambda device: "NVIDIA H300")
    assert choices_for(torch.device("cpu"), shape_8b(1), torch.bfloat16) == tables()[0]
    assert f"the file is left out: {bad} is no table of choices" in caplog.text
    monkeypatch.setattr(choices, "card_name", lambda device: "NVIDIA H100")
    with pytest.raises(ConfigError, match="measure again"):
        choices_for(torch.device("cpu"), shape_8b(1), torch.bfloat16)


def test_an_entry_serves_the_rows_up_to_its_own():
    table = tables()[0]
    assert [table.product("out", rows).is_own for rows in (1, 15, 16, 17, 40, 41)] == 3 * [True] + 3 * [False]
    assert [table.product("out", rows).padded_to for rows in (17, 40, 41)] == [64, 64, 0]
    assert table.product("down", 1) == Product()
    assert [table.switches_of(rows).joins for rows in (1, 16, 17)] == [True, True, False]


def test_the_name_of_a_table_tells_two_tables_apart():
    names = {table.name for table in tables()}
    assert len(names) == 2
    assert all(name.startswith("NVIDIA H300 ") for name in names)
    assert NO_CHOICES.name == ""


@pytest.mark.parametrize(
    ("products", "message"),
    [
        ({"out": {"8": OWN}}, "the same for 1 to 16 rows"),
        ({"out": {"1": OWN, "16": OWN | {"splits": 4}}}, "the same for 1 to 16 rows"),
        ({"out": {"1": OWN | {"kernel": "row"}, "16": OWN}}, "the same for 1 to 16 rows"),
        ({"out": {"1": ROW, "16": ROW | {"num_warps": 8}}}, "num_warps of row must be the same for 1 to 16 rows"),
        ({"out": {"16": OWN | {"block_n": 96}}}, "block_n=96, block_k=128 and num_warps=4 .* must be powers of two"),
        ({"out": {"16": OWN | {"block_k": 384}}}, "block_k=384 .* must be powers of two"),
        ({"out": {"16": OWN | {"num_warps": 3}}}, "num_warps=3 .* must be powers of two"),
        ({"out": {"128": OWN}}, "up to 128 rows: own products have at most 64"),
        ({"head": {"16": OWN | {"splits": 1}}}, "not of the head"),
        ({"qkv": {"16": OWN}}, "splits=2 is for out and down"),
        ({"down": {"16": {"kernel": "dot", "block_n": 32}}}, "needs block_n, block_k"),
        ({"down": {"16": {"padded_to": 8}}}, "padded_to=8 is not from 16 to 512"),
        ({"downs": {"16": OWN}}, "Input should be 'qkv'"),
        ({"down": {"16": {"kernel": "fast"}}}, "Input should be 'library'"),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_its_file(tmp_path, products, message):
    path = tmp_path / "choices.json"
    path.write_text(json.dumps([{"device": "NVIDIA H300", "products": products}]))
    with pytest.raises(ConfigError, match=f"choices.json is no table of choices: .*{message}.*measure again"):
        read_choices(path)


def test_an_own_product_may_have_other_tiles_where_it_sums_in_the_same_order():
    wide = Product(**OWN | {"block_n": 16, "num_warps": 8})
    assert Choices(products={"out": {1: Product(**OWN), 16: wide}}).product("out", 2) == wide
    with pytest.raises(ValidationError):
        Choices(products={"out": {1: Product(**OWN), 16: Product(**OWN | {"block_k": 64})}})


@pytest.mark.parametrize("tiles", [{"block_n": 8192}, {"splits": 5}, {"block_k": 4096}])
def test_tiles_that_do_not_divide_a_matrix_are_refused(tiles):
    sizes = Sizes.of(shape_8b(1), torch.bfloat16)
    Choices(sizes=sizes, products={"out": {16: Product(**OWN)}})
    with pytest.raises(ValidationError, match="4096 columns are no multiple of block_n, or 4096 entries"):
        Choices(sizes=sizes, products={"out": {16: Product(**OWN | tiles)}})


@pytest.mark.parametrize(
    ("capability", "triton", "early"),
    [((9, 0), "3.7.0", True), ((9, 0), "3.3.1", False), ((10, 0), "3.10.0+git1", True), ((8, 9), "3.7.0", False)],
)
def test_kernels_are_launched_early_where_the_device_and_triton_can(monkeypatch, capability, triton, early):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    assert choices.launches_early(torch.device("cuda")) is early


def test_every_shipped_table_is_of_a_card_that_was_measured():
    for path in choices.shipped_files():
        measured = json.loads(path.with_name("checks.json").read_text())["conditions"]["device"]
        assert {table.device for table in read_choices(path)} == {measured}
