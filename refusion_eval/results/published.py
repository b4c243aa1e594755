"""The published figures that come with the package, and which published system a run is an instance of."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from refusion_eval.errors import DataError
from refusion_eval.results.figure import Figure, backbone_suffix
from refusion_eval.runs.model_args import system_of_label
from refusion_eval.runs.published import published_systems

# Decoder settings that make another system of one. Their names are the names of the variants.
VARIANTS = ("recompute_kv", "left_to_right")
# The variant of systems that transformers' own loop decodes, and what their labels have in brackets.
GENERATE = "generate"


def published_path() -> Path:
    """The folder with published.csv, claims.csv and their companions.

    An installed wheel carries it inside the package; a source checkout has it in results/.

    Raises:
        DataError: neither place has it.
    """
    package = Path(__file__).resolve().parent.parent
    candidates = (package / "published", package.parent / "results" / "published")
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise DataError(f"no published figures at {candidates[0]} or {candidates[1]}; reinstall refusion_eval")


@cache
def read_published(name: str) -> tuple[dict[str, str], ...]:
    """The rows of one of the CSV files, every value as it is printed.

    Args:
        name: file name, such as "published.csv".

    Raises:
        DataError: there is no such file.
    """
    path = published_path() / name
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return tuple(csv.DictReader(stream))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); reinstall refusion_eval") from error


def published_figures(artefacts: Sequence[str] = ()) -> list[Figure]:
    """The published figures, in the order of their tables.

    Args:
        artefacts: tables and figures to take (table1, figure1, ...); all if empty.

    Raises:
        DataError: the files are missing.
    """
    rows = read_published("published.csv")
    return [_published(row) for row in rows if row["value"] and (not artefacts or row["artefact"] in artefacts)]


def _published(row: Mapping[str, str]) -> Figure:
    pairs = (part.partition("=") for part in row["settings"].split("; ") if part)
    settings = {name: value for name, _, value in pairs}
    return Figure(
        origin="published",
        system=row["system"],
        label=row["label"],
        backbone=row["backbone"],
        benchmark=row["task"],
        task=row["task"],
        metric=row["metric"],
        value=float(row["value"]),
        unit=row["unit"],
        artefact=row["artefact"],
        defect=row["defect"],
        hardware=settings.get("gpu", ""),
        batch_size=settings.get("batch_size", ""),
        settings=settings,
        notes=tuple(filter(None, (row["note"],))),
    )


def system_key(label: str, backbone: str, settings: Mapping[str, str]) -> str:
    """The key of a measured system.

    A label that the paper prints stands for the paper's system. A decoder's own label (AR, LLaDA) stands for the
    published system of that decoder and backbone, or else for the decoder. Brackets at the end of a label name a
    settings table, which makes no other system, or `GENERATE`, which does; so do the settings in `VARIANTS`.

    Args:
        label: name that the run gave its system.
        backbone: model that the system was made from.
        settings: decoder settings in force, as text.
    """
    plain, _, bracket = label.removesuffix(")").rpartition(" (") if label.endswith(")") else (label, "", "")
    key = _keys_by_label().get(label) or _keys_by_label().get(plain) or _key_of_decoder(plain, backbone)
    variants = [name for name in VARIANTS if settings.get(name) == "true" and f"+{name}" not in key]
    variants += [GENERATE] if bracket == GENERATE else []
    return "+".join((key, *variants))


@cache
def published_backbone(system: str) -> str:
    """The model that a published system was made from; empty if the key is not a published one or names no model."""
    return next((row["backbone"] for row in read_published("published.csv") if row["system"] == system), "")


def beside_published(figure: Figure) -> Figure:
    """The figure as it may stand beside published ones.

    A measured figure on a real benchmark is a published system's only if its checkpoint was made from the same model.
    Otherwise the system gets a key and a label of its own, which end with " on BACKBONE".
    """
    published = published_backbone(figure.system) or published_backbone(figure.base_system)
    if figure.origin == "published" or figure.mini or published in ("", figure.backbone):
        return figure
    suffix = backbone_suffix(figure.backbone)
    return replace(figure, system=figure.system + suffix, label=figure.label + suffix, other_backbone=True)


@cache
def _keys_by_label() -> Mapping[str, str]:
    """Printed label -> key. Of a label that stands for two systems, the one in systems.toml counts."""
    printed = {row["label"]: row["system"] for row in read_published("published.csv")}
    return printed | {system.label: name for name, system in published_systems().items()}


def _key_of_decoder(label: str, backbone: str) -> str:
    decoder = system_of_label(label)
    candidates = [name for name, system in published_systems().items() if system.decoder == decoder]
    return next((name for name in candidates if published_backbone(name) == backbone), decoder)
