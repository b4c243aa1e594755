"""`python -m miniature.pictures`: writes which weights and accuracies the pictures and the sample report show.

`miniature.results` calls it when it has made them. A test compares what it wrote with the weights that are shipped, so
that a picture which is older than they are is found.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from refusion_eval.paper.names import system_label
from refusion_eval.paths import embedded_path
from refusion_eval.results.metric_list import ACCURACY, SCORES
from refusion_eval.results.results_file import read_csv

ROOT = Path(__file__).resolve().parents[1]
OUT = "results/embedded"
PAGE, SCREENSHOT, REPLAY = f"{OUT}/sample-report.html", "docs/report-page.png", f"{OUT}/artefacts/replay.gif"
FACTS = f"{OUT}/pictures.json"
MOST_BYTES = 3_000_000  # of the sample report, which is kept in the repository
# The runs in the sample report -> the checkpoints that decoded; one more of them would make it too large.
REPORTED = {
    "embedded-autoregressive_sft": "autoregressive_sft",
    "embedded-bd3lm-merged": "bd3lm",
    "embedded-refusion-unfused": "refusion",
    "embedded-refusion-verifier": "refusion",
}
# Picture -> the runs that it shows. The animation is decoded for itself, with the settings of ReFusion.
PICTURES = {PAGE: tuple(REPORTED), SCREENSHOT: tuple(REPORTED), REPLAY: ("embedded-refusion-unfused",)}


def facts(picture: str, root: Path = ROOT) -> dict[str, Any]:
    """SHA-256 of a picture and of the weights that it shows, and the accuracies, in percent, of those on the page."""
    runs = PICTURES[picture]
    weights = {
        name: _sha256(embedded_path(name) / "model.safetensors") for name in sorted({REPORTED[run] for run in runs})
    }
    accuracy: dict[str, dict[str, float]] = {}
    for row in read_csv(root / OUT / "family.csv") if picture != REPLAY else ():
        if row.run_id in runs and row.metric in SCORES:
            accuracy.setdefault(system_label(row), {})[row.task] = row.value
    return {"sha256": _sha256(root / picture), "weights": weights, **({ACCURACY: accuracy} if accuracy else {})}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Command line."""
    if (size := (ROOT / PAGE).stat().st_size) >= MOST_BYTES:
        raise SystemExit(
            f"{PAGE} has {size:,} bytes, and at most {MOST_BYTES:,} may be kept; leave out a run of REPORTED"
        )
    written = {picture: facts(picture) for picture in PICTURES}
    (ROOT / FACTS).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
