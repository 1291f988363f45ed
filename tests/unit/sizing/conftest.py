"""Described models, each expanded once."""

import functools
from pathlib import Path

import pytest

from rdt_e2e.checkpoint.described import describe
from rdt_e2e.checkpoint.layout import build_layout
from rdt_e2e.sizing.catalog import CATALOG
from rdt_e2e.sizing.chunks import Planner


@functools.cache
def index_of(name):
    return describe(CATALOG[name].config, Path(name))


@functools.cache
def planner_of(name):
    index = index_of(name)
    return Planner(build_layout(index), index.config)


@pytest.fixture(scope="session")
def described():
    """The index of a model of the catalogue, by name."""
    return index_of


@pytest.fixture(scope="session")
def planner():
    """The planner of a model of the catalogue, by name; it keeps its plans between tests."""
    return planner_of
