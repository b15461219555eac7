"""The families are complete, those in the files are those in the table, and what is looked up in them is unique."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from itertools import chain

import diffusers
import pytest

import models
from models.families import FAMILIES, FORMS, PLANS, SIZES
from models.family import Family
from models.pipeline_form import FLAGS
from models.shapes import SHAPES


def test_every_family_of_a_file_is_in_the_table():
    names = {found.name for found in pkgutil.iter_modules(models.__path__)} - {"families"}
    modules = [importlib.import_module(f"models.{name}") for name in names]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Family)]
    assert sorted(family.plan.name for family in found) == sorted(family.plan.name for family in FAMILIES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.plan.name)
def test_a_family_is_complete(family):
    transformer = getattr(diffusers, family.plan.transformer)
    assert family.forms
    for form in family.forms:
        assert hasattr(diffusers, form.name)
        assert set(form.takes) <= set(FLAGS)
    assert family.configs
    for configs in family.configs:
        assert set(family.sizes.vae_keys) <= set(configs.vae)
        shape, released = SHAPES[configs.name], family.sizes.released
        assert shape.rows(released.frames, released.height, released.width) > 0
        if configs.class_defaults:
            parameters = inspect.signature(transformer.__init__).parameters
            assert {name: parameters[name].default for name in configs.transformer} == configs.transformer


def test_the_tables_hold_every_family_once():
    for table, entries in (
        (PLANS, [(family.plan.transformer, family.plan) for family in FAMILIES]),
        (SIZES, [(family.plan.name, family.sizes) for family in FAMILIES]),
        (FORMS, [(form.name, form) for family in FAMILIES for form in family.forms]),
    ):
        assert list(table.items()) == entries, "a name that occurs twice hides the first of its entries"
    assert list(SHAPES) == list(chain.from_iterable([c.name for c in family.configs] for family in FAMILIES))
    assert all(PLANS[shape.plan.transformer] is shape.plan for shape in SHAPES.values())
