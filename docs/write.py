"""Writes everything in the Markdown files that is made from code or results: `python docs/write.py`.

These are the tables between markers (`generated_tables.py`) and the pages of the reference (`generated_pages.py`).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, where it is not installed

from generated_pages import pages
from generated_tables import ROOT, regenerated

DOCS = ROOT / "docs"


def stale() -> dict[Path, str]:
    """The files that are not what code and results give, with the text that each should have."""
    fresh = {DOCS / name: text for name, text in pages().items()}
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        if path not in fresh:
            fresh[path] = regenerated(path.read_text(encoding="utf-8"))
    return {
        path: text for path, text in fresh.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    }


def main() -> None:
    """Writes them, and prints which files changed."""
    for path, text in stale().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
