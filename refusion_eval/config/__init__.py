"""Settings of every kind: conversion, checks and error messages that all of them share."""

from refusion_eval.config.settings import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    build,
    check_keys,
    convert,
    field_types,
    read_values,
    settings_class,
)
from refusion_eval.config.yaml_file import mapping, read_yaml

__all__ = [
    "Fraction",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "build",
    "check_keys",
    "convert",
    "field_types",
    "mapping",
    "read_values",
    "read_yaml",
    "settings_class",
]
