"""A strategy as a document: plain values in a versioned schema, and back.

    {"version": 1,
     "presets": {"sparse": {"geometry": "64x64", "budget": {"method": "top-k", "sparsity": 0.75}}},
     "layouts": {"middle": {"4-31": "sparse"}},
     "schedule": {"steps": {"10-": "middle"}}}

Every field but `version` may be left out, and nothing else is a field. `schedule` is {"steps": {range: layout}} or
{"layout": name, "kept": [one share per step]}; a budget is top-k, top-p or per-head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import fields as fields_of
from typing import Any

from ..selection import BlockGeometry, Budget, HeadTopK, SubBlock, TopK, TopP
from .fields import boolean, fields, integer, mapping, number, numbers, one_of, place, shown, text
from .layout import Layout
from .presets import BlockSparse
from .ranges import Range
from .roles import Roles
from .schedule import Decay, Schedule, StepRanges
from .strategy import NOT_QUALIFIED, Strategy

VERSION = 1
_BUDGETS = {"top-k": TopK, "top-p": TopP, "per-head": HeadTopK}
_ROLES = [field.name for field in fields_of(Roles)]


def strategy_from(document: Any) -> Strategy:
    """The strategy that `document` describes. Raises ValueError with the place of what is wrong."""
    optional = ("status", "presets", "layouts", "schedule", "dense_tail", "min_rows", "roles", "token_order")
    found = fields(document, "the strategy", required=("version",), optional=optional)
    if type(found["version"]) is not int or found["version"] != VERSION:
        raise ValueError(f"version {shown(found['version'])} of a strategy document is unknown; this reads {VERSION}")
    layouts = mapping(found.get("layouts", {}), "layouts")
    roles = fields(found.get("roles", {}), "roles", optional=_ROLES)
    return Strategy(
        presets={
            name: _preset(value, f"presets.{name}")
            for name, value in mapping(found.get("presets", {}), "presets").items()
        },
        layouts={name: Layout(ranges=_ranges(value, f"layouts.{name}")) for name, value in layouts.items()},
        schedule=_schedule(found.get("schedule", {"steps": {}})),
        dense_tail=integer(found.get("dense_tail", 0), "dense_tail"),
        min_rows=integer(found.get("min_rows", 0), "min_rows"),
        roles=Roles(**{name: text(value, f"roles.{name}") for name, value in roles.items()}),
        token_order=one_of(found.get("token_order", "raster"), "token_order", ("raster", "serpentine")),  # type: ignore[arg-type]
        status=text(found.get("status", NOT_QUALIFIED), "status"),
    )


def document_of(strategy: Strategy) -> dict[str, Any]:
    """The document of `strategy`, with every field stated; ValueError for a selector of one's own."""
    schedule = strategy.schedule
    return {
        "version": VERSION,
        "status": strategy.status,
        "presets": {name: _document_of_preset(method) for name, method in strategy.presets.items()},
        "layouts": {name: _spell(layout.ranges) for name, layout in strategy.layouts.items()},
        "schedule": {"steps": _spell(schedule.ranges)}
        if isinstance(schedule, StepRanges)
        else {"layout": schedule.layout, "kept": list(schedule.kept)},
        "dense_tail": strategy.dense_tail,
        "min_rows": strategy.min_rows,
        "roles": asdict(strategy.roles),
        "token_order": strategy.token_order,
    }


def _preset(value: Any, where: str) -> BlockSparse:
    found = fields(value, where, required=("geometry", "budget"), optional=("selector", "dense_prefix_queries"))
    selector_at = f"{where}.selector"
    selector = fields(found.get("selector", {}), selector_at, optional=("method", "reduce", "cell_rows"))
    one_of(selector.get("method", "subblock"), f"{selector_at}.method", ("subblock",))
    reduce = one_of(selector.get("reduce", "lse"), f"{selector_at}.reduce", ("lse", "max", "mean"))
    cell_rows = selector.get("cell_rows")
    geometry = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text(found["geometry"], f"{where}.geometry"))
    if geometry is None:
        raise ValueError(
            f"{where}.geometry must be query rows x key rows, as in '128x64', got {shown(found['geometry'])}"
        )
    budget = _budget(found["budget"], f"{where}.budget")
    dense_prefix_queries = boolean(found.get("dense_prefix_queries", True), f"{where}.dense_prefix_queries")
    if cell_rows is not None:
        cell_rows = integer(cell_rows, f"{selector_at}.cell_rows")
    with place(where):
        return BlockSparse(
            geometry=BlockGeometry(query_rows=int(geometry[1]), key_rows=int(geometry[2])),
            selector=SubBlock(budget=budget, reduce=reduce, cell_rows=cell_rows),  # type: ignore[arg-type]
            dense_prefix_queries=dense_prefix_queries,
        )


def _budget(value: Any, where: str) -> Budget:
    method = one_of(mapping(value, where).get("method"), f"{where}.method", _BUDGETS)
    kind = _BUDGETS[method]
    names = [field.name for field in fields_of(kind) if field.name != "counts_protected"]
    found = fields(value, where, required=("method", *names), optional=("counts_protected",))
    values = {
        name: numbers(found[name], f"{where}.{name}") if name == "weights" else number(found[name], f"{where}.{name}")
        for name in names
    }
    protected = boolean(found.get("counts_protected", False), f"{where}.counts_protected")
    with place(where):
        return kind(**values, counts_protected=protected)


def _ranges(value: Any, where: str) -> dict[Range, str]:
    found: dict[Range, str] = {}
    for spelled, name in mapping(value, where).items():
        with place(where):
            each = Range.parse(spelled)
        if each in found:
            raise ValueError(f"{where} names the range '{each}' twice")
        found[each] = text(name, f"{where}.{spelled}")
    return found


def _schedule(value: Any) -> Schedule:
    if "kept" in mapping(value, "schedule"):
        found = fields(value, "schedule", required=("layout", "kept"))
        return Decay(layout=text(found["layout"], "schedule.layout"), kept=numbers(found["kept"], "schedule.kept"))
    found = fields(value, "schedule", required=("steps",), optional=("layout", "kept"))
    if "layout" in found:
        raise ValueError("schedule has both steps and layout; a layout of its own goes with 'kept'")
    return StepRanges(ranges=_ranges(found["steps"], "schedule.steps"))


def _document_of_preset(method: BlockSparse) -> dict[str, Any]:
    selector = method.selector
    if not isinstance(selector, SubBlock):
        raise ValueError(f"a {type(selector).__name__} has no place in a strategy document; SubBlock has")
    names = {kind: name for name, kind in _BUDGETS.items()}
    budget = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(selector.budget).items()}
    return {
        "geometry": str(method.geometry),
        "selector": {"method": "subblock", "reduce": selector.reduce, "cell_rows": selector.cell_rows},
        "budget": {"method": names[type(selector.budget)], **budget},
        "dense_prefix_queries": method.dense_prefix_queries,
    }


def _spell(ranges: Mapping[Range, str]) -> dict[str, str]:
    return {str(each): name for each, name in ranges.items()}
