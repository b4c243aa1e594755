"""What the package stands on: every library that an installation brings, its licence, and whether that is allowed.

`python -m refusion_eval.supply_chain` prints the list and fails on a licence that nobody has allowed. With
`--vulnerabilities` it also asks pip-audit, and says plainly where the vulnerability service does not answer.
"""

import argparse
import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DISTRIBUTION = "refusion-eval"
ALLOWED = Path(__file__).with_name("supply_chain.yaml")
UNKNOWN = "unknown"
AUDIT_SECONDS = 120

# Libraries without an SPDX expression describe their licence in words; the first pattern that fits counts.
_WORDS = (
    (r"apache", "Apache-2.0"),
    (r"\bMIT\b|expat", "MIT"),
    (r"bsd.{0,8}3|new bsd|modified bsd|3-clause", "BSD-3-Clause"),
    (r"bsd.{0,8}2|2-clause", "BSD-2-Clause"),
    (r"\bBSD\b", "BSD"),
    (r"mozilla|MPL", "MPL-2.0"),
    (r"affero|AGPL", "AGPL"),
    (r"lesser|LGPL", "LGPL"),
    (r"general public|\bGPL", "GPL"),
    (r"python software foundation|\bPSF", "PSF-2.0"),
    (r"\bISC\b", "ISC"),
    (r"unlicense", "Unlicense"),
    (r"nvidia|proprietary", "proprietary"),
)


class Library(NamedTuple):
    """An installed distribution and what it says of its licence, in SPDX terms where it can be told."""

    name: str
    version: str
    licence: str


def libraries(root: str = DISTRIBUTION) -> list[Library]:
    """Everything that an installed distribution needs, directly or not, without its extras; sorted by name."""
    found: dict[str, Library] = {}
    waiting = [(root, frozenset[str]())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        entry = waiting.pop()
        if entry in seen:
            continue
        seen.add(entry)
        name, extras = entry
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # what a marker of another platform, or a looser environment, leaves out is not installed
        if name != root:
            found[name] = Library(name, distribution.version, licence_of(distribution.metadata))
        waiting.extend(_needed(distribution.requires or (), extras))
    return sorted(found.values())


def _needed(requirements: Sequence[str], extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(wanted.name), frozenset(wanted.extras)


def licence_of(fields: metadata.PackageMetadata) -> str:
    """The licence that a distribution states: its SPDX expression, else its classifiers, else the first words."""
    if "License-Expression" in fields:
        return fields["License-Expression"]
    classified = [text for text in fields.get_all("Classifier") or () if text.startswith("License ::")]
    stated = [text.rpartition("::")[2] for text in classified]
    stated = [text for text in stated if "OSI Approved" not in text] or _first_line(fields)
    named = sorted({_named(text) for text in stated} - {UNKNOWN})
    return " OR ".join(named) or UNKNOWN


def _first_line(fields: metadata.PackageMetadata) -> list[str]:
    return fields["License"].splitlines()[:1] if "License" in fields else []


def _named(text: str) -> str:
    return next((name for pattern, name in _WORDS if re.search(pattern, text, re.IGNORECASE)), UNKNOWN)


def complaints(found: Sequence[Library], allowed_path: Path = ALLOWED) -> list[str]:
    """One sentence for every library whose licence is not allowed; allowed are licences, and libraries by name."""
    allowed = yaml.safe_load(allowed_path.read_text(encoding="utf-8"))
    return [
        f"{it.name} {it.version}: the licence is {it.licence}, which {allowed_path.name} does not allow; replace the "
        "library, or read its licence and enter it there"
        for it in found
        if not any(fnmatch.fnmatchcase(it.name, name) for name in allowed["libraries"])
        and not _is_allowed(it.licence, allowed["licences"])
    ]


def _is_allowed(expression: str, licences: Sequence[str]) -> bool:
    """Whether an SPDX expression of AND and OR leaves a choice of allowed licences; all parts of an AND have to be."""
    plain = expression.replace("(", " ").replace(")", " ")
    return any(all(part.strip() in licences for part in choice.split(" AND ")) for choice in plain.split(" OR "))


def vulnerabilities() -> tuple[bool, str]:
    """Asks pip-audit about everything that is installed.

    Returns:
        Whether nothing is known against it, as far as the service could be asked, and what to print.
    """
    if util.find_spec("pip_audit") is None:
        return True, "vulnerabilities: NOT CHECKED, pip-audit is not installed; it comes with the extra dev"
    command = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--timeout", "15"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=AUDIT_SECONDS)
    except subprocess.TimeoutExpired:
        return True, f"vulnerabilities: NOT CHECKED, no answer within {AUDIT_SECONDS} s"
    if done.returncode == 0:
        return True, "vulnerabilities: none known"
    if "vulnerabilit" in done.stderr and "Found" in done.stderr:
        return False, f"vulnerabilities:\n{done.stdout}"
    reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return True, f"vulnerabilities: NOT CHECKED, the service does not answer ({reason})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the list; returns 1 if a licence is not allowed, or a vulnerability known."""
    parser = argparse.ArgumentParser(prog="python -m refusion_eval.supply_chain", description=__doc__)
    parser.add_argument("--vulnerabilities", action="store_true", help="also ask pip-audit")
    options = parser.parse_args(arguments)
    found = libraries()
    for it in found:
        print(f"{it.name:<28} {it.version:<18} {it.licence}")
    wrong = complaints(found)
    for text in wrong:
        print(f"error: {text}", file=sys.stderr)
    if options.vulnerabilities:
        is_sound, text = vulnerabilities()
        print(text, file=sys.stdout if is_sound else sys.stderr)
        return int(bool(wrong) or not is_sound)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
