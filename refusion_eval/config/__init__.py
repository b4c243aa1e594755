"""Reading settings: conversion, checks and error messages shared by everything that a user configures."""
