"""The published numbers, and the keys by which measured systems stand beside published ones."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from refusion_eval.benchmarks import RELEASE
from refusion_eval.errors import DataError
from refusion_eval.results.measurement import ON_BACKBONE, VARIANTS, Measurement
from refusion_eval.runs.systems import published_systems, system_of_label


def published_path() -> Path:
    """The folder with published.csv, claims.csv and their companions. Raises DataError if it is missing."""
    # An installed wheel carries it inside the package; a source checkout has it in results/.
    package = Path(__file__).resolve().parent.parent
    folders = (package / "published", package.parent / "results" / "published")
    if (folder := next(filter(Path.is_dir, folders), None)) is None:
        raise DataError(f"no published results at {folders[0]} or {folders[1]}; reinstall refusion_eval")
    return folder


@cache
def read_published(name: str) -> tuple[dict[str, str], ...]:
    """The rows of one of the CSV files, every value as it is printed. Raises DataError if it cannot be read."""
    path = published_path() / name
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return tuple(csv.DictReader(stream))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); reinstall refusion_eval") from error


def published_measurements(artefacts: Sequence[str] = ()) -> list[Measurement]:
    """The published numbers, in the order of their tables, of all or of some tables and figures."""
    rows = read_published("published.csv")
    return [_published(row) for row in rows if row["value"] and (not artefacts or row["artefact"] in artefacts)]


def _published(row: Mapping[str, str]) -> Measurement:
    pairs = (part.partition("=") for part in row["settings"].split("; ") if part)
    settings = {name: value for name, _, value in pairs}
    return Measurement(
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
        prompts=RELEASE,
        defect=row["defect"],
        hardware=settings.get("gpu", ""),
        batch_size=settings.get("batch_size", ""),
        settings=settings,
        notes=tuple(filter(None, (row["note"],))),
    )


def system_key(label: str, backbone: str, settings: Mapping[str, str], *, loop: str) -> str:
    """The key of a measured system, whose variants are the settings in `VARIANTS` and one of `OF_LOOPS`."""
    # A label that the paper prints stands for the paper's system, and a decoder's own label (AR, LLaDA) for the
    # published system of that decoder and backbone, or else for the decoder. Brackets at the end of a label name a
    # settings table, which makes no other system.
    # The model's name at the end of a label stays at the end of the key.
    on_backbone = f"{ON_BACKBONE}{backbone}" if label.endswith(f"{ON_BACKBONE}{backbone}") else ""
    label = label.removesuffix(on_backbone)
    plain, _, _ = label.removesuffix(")").rpartition(" (") if label.endswith(")") else (label, "", "")
    key = _keys_by_label().get(label) or _keys_by_label().get(plain) or _key_of_decoder(plain, backbone)
    in_force = [name for name, (setting, value) in VARIANTS.items() if settings.get(setting) == value]
    variants = [name for name in in_force if f"+{name}" not in key] + ([loop] if loop else [])
    return "+".join((key, *variants)) + on_backbone


@cache
def published_backbone(system: str) -> str:
    """The model that a published system was made from; empty if the key is not a published one or names no model."""
    return next((row["backbone"] for row in read_published("published.csv") if row["system"] == system), "")


def beside_published(measurement: Measurement) -> Measurement:
    """The measurement as it may stand beside published ones, of a published system only if the backbone is the same."""
    # Otherwise the system gets a key and a label of its own, which end with " on BACKBONE".
    published = published_backbone(measurement.system) or published_backbone(measurement.base_system)
    if measurement.origin == "published" or measurement.mini or published in ("", measurement.backbone):
        return measurement
    suffix = f"{ON_BACKBONE}{measurement.backbone or 'an unnamed model'}"
    if measurement.system.endswith(suffix):
        return measurement
    return replace(measurement, system=measurement.system + suffix, label=measurement.label + suffix)


@cache
def _keys_by_label() -> Mapping[str, str]:
    """Printed label -> key. Of a label that stands for two systems, the one in systems.toml counts."""
    printed = {row["label"]: row["system"] for row in read_published("published.csv")}
    return printed | {system.label: name for name, system in published_systems().items()}


def _key_of_decoder(label: str, backbone: str) -> str:
    decoder = system_of_label(label)
    if not backbone:  # not known, so that no published system of the decoder is meant, least of all one without numbers
        return decoder
    candidates = [name for name, system in published_systems().items() if system.decoder == decoder]
    return next((name for name in candidates if published_backbone(name) == backbone), decoder)
