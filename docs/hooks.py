"""What mkdocs does beside rendering docs/: adding pages that are made from the code, filling tables from results/."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs"), str(ROOT / "plots")]

from generated_pages import pages  # noqa: E402
from generated_tables import MAKERS  # noqa: E402
from readme_table import regenerated  # noqa: E402

PICTURES = ("results/embedded/*.png", "results/embedded/artefacts/*.png", "results/embedded/artefacts/*.gif")
# A link that leaves docs/ for results/, as a reader of the repository can follow it.
OUTSIDE = re.compile(r"\]\(\.\./((?:\.\./)*results/[^)]+\.(?:png|gif))\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds generated pages, and the pictures of results/ under the same path."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    for pattern in PICTURES:
        for picture in sorted(ROOT.glob(pattern)):
            name = picture.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills the tables of a page, and turns links to pictures into links inside the site."""
    return OUTSIDE.sub(r"](\1)", regenerated(markdown, more=MAKERS))
