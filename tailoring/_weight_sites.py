"""Where the chosen parameters of a model are used, and by which rule."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ._casts import Site
from ._convolutions import convolution, own_kernels_pay
from ._layers import How, rule_for
from ._recurrent import is_patched
from ._watch import Seen


def site_of(key: str, module: str, local: str, parameter: nn.Parameter, how: How, copied: bool = False) -> Site:
    return Site(key, module, 0, 0, 0, -1, tuple(parameter.shape), parameter.dtype, how, local, copied=copied)


def by_rule(model: nn.Module, chosen: set[str]) -> list[Site]:
    """Every chosen parameter in every place where it is used; below a module with such and no rule, all is that module's."""
    names = {id(p): name for name, p in model.named_parameters() if name in chosen}
    sites: list[Site] = []
    covered: set[int] = set()
    for path, module in model.named_modules():
        holders = [module, *(child for child in module.children() if isinstance(child, _HOLDERS))]
        direct = [p for holder in holders for p in holder.parameters(recurse=False)]
        if id(module) in covered or not any(id(p) in names for p in [*direct, *(module.parameters() if is_parametrized(module) else ())]):
            continue
        found = None if is_patched(module) or len(holders) > 1 else rule_for(module)
        whole = found is None or isinstance(module, nn.MultiheadAttention)  # its output projection is not called as a module
        if whole:
            covered |= {id(below) for below in module.modules()}
        local = [(name, p) for name, p in module.named_parameters(recurse=whole, remove_duplicate=False) if id(p) in names]
        sites += [site_of(names[id(p)], path, name, p, found[0] if found else "copies", found is None) for name, p in local]
    return sites


_HOLDERS = (nn.ParameterList, nn.ParameterDict)  # never called: what they hold is their parent's


def apart_if_tied(sites: list[Site]) -> list[Site]:
    """A parameter that layers of different kinds share has copies, which all of them can use."""
    kinds: dict[str, set[str]] = {}
    for s in sites:
        kinds.setdefault(s.key, set()).add(s.how)
    return [s if len(kinds[s.key]) == 1 else replace(s, how="copies") for s in sites]


def with_own_kernels(sites: list[Site], model: nn.Module, seen: list[Seen]) -> list[Site]:
    """Convolutions whose outer products would be larger than their kernels have these for each query, if all that share one have."""
    positions: dict[str, int] = {}  # of one query, in all calls of a module
    for s in seen:
        if s.leaf == 0 and s.rows == 0:
            positions[s.name] = positions.get(s.name, 0) + s.shape[0] * math.prod(s.shape[2:]) // 2
    modules = {name: model.get_submodule(name) for name in positions}
    fit = {name for name, module in modules.items() if _has_kernels(module) and own_kernels_pay(module, positions[name])}
    while True:
        others = {s.key for s in sites if s.module not in fit}
        tied = fit & {s.module for s in sites if s.key in others}
        if not tied:
            break
        fit -= tied
    return [replace(s, how="own kernels") if s.module in fit and s.how == "outer products" else s for s in sites]


def _has_kernels(module: nn.Module) -> bool:
    found = rule_for(module)
    return found is not None and found[1] is convolution


def differs_by_call(sites: list[Site], seen: list[Seen]) -> str | None:
    """A module of the sites whose calls in one pass hold the queries in different dimensions, or of which one is for all queries."""
    found: dict[tuple[str, int], set[int | None]] = {}
    for s in seen:
        found.setdefault((s.name, s.leaf), set()).add(s.rows)
    several = {name for (name, _), rows in found.items() if len(rows) > 1}
    return next((s.module for s in sites if s.module in several), None)


def with_rows(sites: list[Site], seen: list[Seen]) -> tuple[Site, ...]:
    """The sites with the dimensions that hold the queries, as far as the trial passes saw their modules run (else the first)."""
    found: dict[str, dict[int, int | None]] = {}
    for s in seen:
        found.setdefault(s.name, {}).setdefault(s.leaf, s.rows)
    rows = {name: tuple(sorted(leaves.items())) for name, leaves in found.items()}
    parts = tuple(rows.items())
    return tuple(
        replace(s, rows=found.get(s.module, {}).get(0, 0), all_rows=rows.get(s.module, ()), parts=() if s.module else parts) for s in sites
    )
