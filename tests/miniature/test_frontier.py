"""Each system's settings are chosen on draws that are no test items, by one rule (`miniature.frontier`)."""

import json
from pathlib import Path

import pandas
import pytest

from miniature import frontier
from miniature.data import held_out_items, normalised
from miniature.family import EMBEDDED
from miniature.frontier import COLUMNS, choices, measured, write_settings
from miniature.measure import draws
from miniature.systems import System
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.decoders import DECODERS


@pytest.mark.parametrize("benchmark", EMBEDDED.draws)
def test_no_draw_is_a_test_item(benchmark: str) -> None:
    user = BENCHMARKS[benchmark].prompts.user
    chosen = [normalised(user(item.prompt_row)) for item in draws(EMBEDDED, benchmark, 50)]
    assert len(set(chosen)) == 50
    assert not {normalised(user(item.prompt_row)) for item in held_out_items(benchmark)} & set(chosen)


def test_the_fastest_setting_near_the_best_accuracy_is_chosen() -> None:
    points = [(90.0, 1.0), (89.5, 3.0), (88.0, 9.0), (89.2, 2.0)]
    rows = pandas.DataFrame(
        [("ReFusion", "gsm8k", json.dumps({"tau_slot": tpf}), 100, accuracy, tpf, 1, 1) for accuracy, tpf in points],
        columns=COLUMNS,
    )
    (chosen,) = choices(rows)
    assert (chosen.accuracy, chosen.tpf) == (89.5, 3.0)
    rows.loc[1, "settings"] = json.dumps({"serial": True})  # an ablation, which is never the choice
    (chosen,) = choices(rows)
    assert (chosen.accuracy, chosen.tpf) == (89.2, 2.0)


def test_a_grid_holds_each_setting_once_and_every_setting_is_valid() -> None:
    for system in EMBEDDED.systems:
        points = [json.dumps(dict(point), sort_keys=True) for point in system.grid]
        assert len(set(points)) == len(points)
        for point in system.grid:
            needed = {"mask_id": 0, "eos_ids": (1,)}
            names = DECODERS[system.decoder].Settings.__dataclass_fields__
            shared = {name: value for name, value in needed.items() if name in names}
            DECODERS[system.decoder].Settings(gen_length=EMBEDDED.gen_length, **shared, **point)


def test_a_csv_is_continued_and_settings_are_written_for_each_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = next(system for system in EMBEDDED.systems if system.name == "BD3-LM")
    two = System(model=system.model, decoder=system.decoder, name=system.name, grid=system.grid[-2:], most_draws=2)
    out = tmp_path / "frontiers.csv"
    first = measured(EMBEDDED, "embedded:", [two], ["gsm8k"], 4, out)
    assert first.n.tolist() == [2, 2]
    assert set(first.accuracy) <= {0.0, 50.0, 100.0}
    assert (first.tpf > 1).all()
    monkeypatch.setattr(frontier, "measure", None)  # nothing is measured a second time
    again = measured(EMBEDDED, "embedded:", [two], ["gsm8k"], 4, out)
    assert again.settings.tolist() == first.settings.tolist()
    write_settings(EMBEDDED, again, tmp_path)
    written = (tmp_path / "mini_bd3lm.yaml").read_text()
    assert f"gsm8k: {{gen_length: {EMBEDDED.gen_length}, block_length: 16, threshold:" in written
