"""The verifier's token against the paper's rule on several checkpoints (`miniature.verifier`)."""

from dataclasses import replace
from pathlib import Path

import pytest

from miniature import verifier
from miniature.family import EMBEDDED
from miniature.measure import Answer, Measured
from refusion_eval.config import read_yaml
from refusion_eval.paths import tasks_path

SETTINGS = {
    rule: read_yaml(tasks_path() / f"settings/mini_refusion{end}.yaml", "")["benchmarks"]
    for rule, end in (("paper", ""), ("verifier", "_verifier"))
}


def decoded(right: str, forwards: int) -> Measured:
    """As many tokens, 24, and forwards in all, which the first answer has."""
    totals = [(24, forwards, 0), *[(0, 0, 0)] * (len(right) - 1)]
    return Measured([Answer(one == "1", *total) for one, total in zip(right, totals, strict=True)])


FOUND = {
    "gsm8k": {
        "paper": decoded("1000", 12),
        "verifier": decoded("1110", 8),
        "paper_fused": decoded("1000", 6),
        "verifier_fused": decoded("1110", 6),
    },
    "math": {
        "paper": decoded("1100", 24),
        "verifier": decoded("1011", 12),
        "paper_fused": decoded("1100", 12),
        "verifier_fused": decoded("1011", 8),
    },
}


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> dict[int, Path]:
    """Two checkpoints whose decodings are those of FOUND, on no more items than these have."""
    monkeypatch.setattr(verifier, "_decodings", lambda model, task, *given: FOUND[task])
    monkeypatch.setattr(verifier, "asked_items", lambda task, family: [])
    return dict.fromkeys((40, 80), Path("embedded:refusion"))


def test_differences_are_paired_by_item_and_their_mean_pools_all(checkpoints: dict[int, Path], tmp_path: Path) -> None:
    family = replace(EMBEDDED, draws={task: EMBEDDED.draws[task] for task in FOUND})
    rows = verifier.measured(family, {40: checkpoints[40]}, 4, SETTINGS, tmp_path / "verifier.csv")
    assert rows["items"].tolist() == ["draws"] * 3 + ["test items"] * 3 + ["test items, own settings"] * 3
    story, formula, mean = rows.head(3).to_dict("records")
    assert (story["gained"], story["lost"], story["p_value"]) == (2, 0, 0.5)
    assert (formula["gained"], formula["lost"], formula["p_value"]) == (2, 1, 1.0)
    assert (mean["task"], mean["n"], mean["gained"], mean["lost"]) == ("mean", 8, 4, 1)
    assert (mean["accuracy_paper"], mean["accuracy_verifier"], mean["difference"]) == (37.5, 75.0, 37.5)
    assert mean["difference_ci_low"] < 37.5 < mean["difference_ci_high"]
    # All tokens by all forwards, which is not the mean of 2 and 1 or of 3 and 2.
    assert (mean["tpf_paper"], mean["tpf_verifier"], mean["tpf_paper_fused"]) == (48 / 36, 48 / 20, 48 / 18)


def test_a_csv_is_continued(checkpoints: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, out = replace(EMBEDDED, draws={task: EMBEDDED.draws[task] for task in FOUND}), tmp_path / "verifier.csv"
    first = verifier.measured(family, {40: checkpoints[40]}, 4, SETTINGS, out)
    asked: list[str] = []
    monkeypatch.setattr(verifier.api, "load_model", asked.append)
    rows = verifier.measured(family, checkpoints, 4, SETTINGS, out)
    assert len(asked) == 3  # the new checkpoint alone, once for each kind of items
    assert rows["samples"].tolist() == [40] * len(first) + [80] * len(first)


def test_both_rules_are_measured_with_and_without_fused_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def measure(model: object, decoder: str, benchmark: object, chosen: object, **settings: object) -> Measured:
        asked[settings["completion"], settings["fuse"]] = settings
        return decoded("1", 1)

    monkeypatch.setattr(verifier, "measure", measure)
    found = verifier._decodings(None, "gsm8k", [], {rule: SETTINGS[rule]["gsm8k"] for rule in verifier.RULES})
    assert list(found) == ["paper", "verifier", "paper_fused", "verifier_fused"]
    assert set(asked) == {(rule, fused) for rule in ("paper", "verifier") for fused in (False, True)}
    for (rule, _), settings in asked.items():
        assert settings["slot_size"] == SETTINGS[rule]["gsm8k"]["slot_size"]
    assert SETTINGS["paper"]["gsm8k"]["slot_size"] != SETTINGS["verifier"]["gsm8k"]["slot_size"]
