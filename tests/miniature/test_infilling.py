"""What the systems of the equal start make of a suffix (`miniature.infilling`)."""

from pathlib import Path

import pandas
import pytest

from miniature import infilling
from miniature.infilling import COLUMNS, SYSTEMS, main, table
from refusion_eval.paths import embedded_path


def test_models_are_asked_with_the_controls_that_their_system_can_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    weights = {(stage, 7): embedded_path(stage) for stage in ("autoregressive_sft", "llada", "bd3lm")}
    monkeypatch.setattr(infilling, "trained", lambda courses: weights)
    monkeypatch.setattr(infilling, "SYSTEMS", [one for one in SYSTEMS if one.decoder in ("autoregressive", "llada")])
    words = [
        "measure",
        "--courses",
        "c",
        "--runs",
        str(tmp_path / "runs"),
        "--limit",
        "1",
        "--out",
        str(tmp_path / "x"),
    ]
    main(words)
    found = pandas.read_csv(tmp_path / "x", keep_default_na=False)
    assert list(found.columns) == list(COLUMNS)
    asked = found.groupby("system").control.unique().map(sorted).to_dict()
    assert asked == {"AR-SFT, prefix only": ["_prefix_only"], "LLaDA": ["", "_prefix_only", "_wrong_suffix"]}
    assert set(found.seed) == {7}
    before = (tmp_path / "x").read_bytes()
    main(words)  # runs that are there are continued
    assert (tmp_path / "x").read_bytes() == before
    found.assign(seed=8).to_csv(tmp_path / "x", index=False)
    main(words)  # what the file has of other seeds stays
    assert pandas.read_csv(tmp_path / "x").seed.value_counts().to_dict() == {7: len(found), 8: len(found)}
    assert "AR-SFT, prefix only" in capsys.readouterr().out


def test_the_gain_by_the_suffix_is_paired_over_items_and_seeds() -> None:
    right = {"": (1, 1, 1, 0), "_prefix_only": (1, 0, 0, 0), "_wrong_suffix": (0, 0, 0, 0)}
    rows = [
        ("ReFusion", seed, "math", control, item, value, 8, 2 if control == "" else 4, 30)
        for seed in (1, 2)
        for control, values in right.items()
        for item, value in enumerate(values)
    ]
    (found,) = table(pandas.DataFrame(rows, columns=list(COLUMNS))).to_dict("records")
    assert found["seeds"] == 2
    assert (found["suffix, %"], found["prefix only, %"], found["wrong suffix, %"]) == (75, 25, 0)
    assert (found["suffix, forwards"], found["prefix only, forwards"]) == (2, 4)
    assert found["by the suffix"].startswith("+50.0 [")
