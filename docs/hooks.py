"""What mkdocs does beside rendering docs/: it adds pages and pictures from elsewhere in the repository."""

import re
from os.path import relpath
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# Files of the repository that are pages too, by their path: path of the page.
PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "performance/README.md": "project/performance.md",
    "tests/data/README.md": "reference/goldens.md",
    "results/published/README.md": "reference/published.md",
    "results/embedded/sample-report.html": "sample-report.html",
    **{
        path.relative_to(ROOT).as_posix(): f"reference/tasks/{path.parent.name}.md"
        for path in sorted((ROOT / "tasks").glob("*/README.md"))
        if path.parent.name != "settings"  # in a page of the reference
    },
}
PICTURES = (
    "results/embedded/*.png",
    "results/embedded/artefacts/*.png",
    "results/embedded/artefacts/*.gif",
    "results/lengths/*.png",
)
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"\]\(([\w./-]+)((?:#[\w-]+)?)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages, and the pictures of results/ under the same path."""
    pictures = [path.relative_to(ROOT).as_posix() for pattern in PICTURES for path in sorted(ROOT.glob(pattern))]
    for page, source in (*SOURCES.items(), *zip(pictures, pictures, strict=True)):
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Turns links between files of the repository into links between pages, and else into links to the repository."""
    here = page.file.src_uri
    folder = (ROOT / SOURCES[here] if here in SOURCES else DOCS / here).parent

    def in_site(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return link[0]
        path = target.relative_to(ROOT).as_posix()
        path = PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(path) is None:
            return f"]({config.repo_url}/blob/main/{target.relative_to(ROOT).as_posix()}{link[2]})"
        return f"]({relpath(path, Path(here).parent)}{link[2]})"

    return LINK.sub(in_site, markdown)
