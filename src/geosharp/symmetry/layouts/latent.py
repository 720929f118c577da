"""Multi-head latent attention (DeepSeek-V2 and its kin): keys and values of all heads from one narrow, normalized latent.

A head's queries and keys are each a part without positions, products of their own in every head, and a rotated part whose
key is one for all heads: the queries of every head meet it, so they are one stack. Values and output are as elsewhere.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from geosharp.symmetry.between import gain_offset, number, rotary_of
from geosharp.symmetry.block import Factors
from geosharp.symmetry.features import Features, LinearMap, join, pairs
from geosharp.symmetry.layouts.projections import adapted, finished, head_count, map_at
from geosharp.symmetry.reading import Dropped, Known, Reading
from geosharp.symmetry.site import AttentionSite
from geosharp.symmetry.view import AnyView, View, parameter_of

_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclasses.dataclass(frozen=True)
class _Latent:
    query: LinearMap
    latent: LinearMap
    both: LinearMap
    output: LinearMap
    heads: int
    still: int
    turned: int
    values: int

    def queries(self) -> Features:
        """All queries as (heads, still and turned features)."""
        return self.query.made().split(0, self.heads, -1)

    def broken(self) -> str:
        """Why the weights alone are not the maps, or nothing."""
        return adapted(self.query, self.latent, self.both, self.output)


def _found(name: str, module: nn.Module) -> _Latent | None:
    query = map_at(module, name, "q_b_proj") or map_at(module, name, "q_proj")
    latent, both, output = (map_at(module, name, path) for path in ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
    heads, sizes = head_count(module), [number(module, size) for size in _SIZES]
    if query is None or latent is None or both is None or output is None or heads is None:
        return None
    still, turned, values = (size or 0 for size in sizes)
    fits = (query.outputs, both.outputs, output.inputs) == (heads * (still + turned), heads * (still + values), heads * values)
    one_key = latent.outputs == both.inputs + turned
    return _Latent(query, latent, both, output, heads, still, turned, values) if fits and one_key and still and values else None


def latent_attention(name: str, module: nn.Module, parent: nn.Module | None) -> list[AttentionSite]:
    """The parts without positions, and values and output."""
    found = _found(name, module)
    if found is None:
        return []
    both = found.both.made().split(0, found.heads, -1)
    site = AttentionSite(
        name=name or "attention",
        heads=found.heads,
        width=found.still,
        query=(found.queries()[:, : found.still],),
        key=(both[:, : found.still],),
        value=(both[:, found.still :],),
        output=(found.output.used().split(0, found.heads, -1),),
        output_bias=found.output.bias,
        broken=found.broken(),
    )
    return [dataclasses.replace(finished(site, module, name)[0], rotary=None, value_rotary=False)]


def latent_positions(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """The rotated part: all heads' queries and the one key."""
    found = _found(name, module)
    if found is None or not found.turned:
        return []
    label, rotary = join(name, "query_key_shared"), rotary_of(module, found.turned)
    if reason := latent_attention(name, module, parent)[0].broken or _normed_key(module):
        return [Reading((), (Dropped(label, reason),))]
    queries = [found.queries()[head : head + 1, found.still :] for head in range(found.heads)]
    key = found.latent.made()[found.both.inputs :].split(0, 1, -1)
    if rotary is None:
        left = tuple(view for one in queries for view in one.matrix())
        return [Reading((Factors(label, left, key.matrix(), kind="query-key"),))]
    orders = (rotary.interleaved,) if rotary.known else (rotary.interleaved, not rotary.interleaved)
    return [Reading((_turned(label, queries, key, interleaved=order),)) for order in orders]


def _normed_key(module: nn.Module) -> str:
    """Why the rotated key is no linear map of the inputs, or nothing."""
    names = (name for name, _ in module.named_children() if "norm" in name and ("rope" in name or "rot" in name))
    return next((f"{name} normalizes the rotated key" for name in names), "")


def _turned(label: str, queries: list[Features], key: Features, *, interleaved: bool) -> Factors:
    left: tuple[AnyView, ...] = tuple(view for one in queries for view in pairs(one, interleaved=interleaved))
    return Factors(label, left, pairs(key, interleaved=interleaved), kind="rotary query-key")


# The latents ----------------------------------------------------------------------------------------------------------


def latent_spaces(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """A normalized latent may be turned, and its gains scaled, where the maps around it follow."""
    found = _found(name, module)
    sides = (("q_a_proj", "q_a_layernorm", "q_b_proj"), ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"))
    known = []
    for before, between, after in sides if found is not None and not found.broken() else ():
        first, norm, second = map_at(module, name, before), getattr(module, between, None), map_at(module, name, after)
        plain = isinstance(norm, nn.Module) and not isinstance(norm, nn.LayerNorm) and gain_offset(norm) == 0.0
        if first is not None and second is not None and plain:
            size, free = second.inputs, _LatentSpace(first, f"{join(name, between)}.weight", second)
            reason = "it shares entries with the blocks of queries, keys and values"
            known.append(Known(join(name, between), "latent space", f"O({size}) x R+", size * (size + 1) // 2, reason, free))
    return [Reading((), (), tuple(known))] if known else []


@dataclasses.dataclass(frozen=True)
class _LatentSpace:
    """Rotations in front of the norm, and scales of its gains, each taken back by the map behind it."""

    before: LinearMap
    gain: str
    after: LinearMap

    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        gain, made, used = parameter_of(values, View(self.gain)), self.before.made(), self.after.used().weight
        reads, size = used.of(parameter_of(values, used)), self.after.inputs
        for i in range(size):
            scaled, change = torch.zeros_like(gain), torch.zeros_like(parameter_of(values, used))
            scaled[i] = gain[i]
            used.of(change)[i] = -reads[i]
            yield {self.gain: scaled, used.parameter: change}
        for i, j in itertools.combinations(range(size), 2):
            change = torch.zeros_like(parameter_of(values, used))
            used.of(change)[i], used.of(change)[j] = -reads[j] * gain[j] / gain[i], reads[i] * gain[i] / gain[j]
            turned = {used.parameter: change}
            for view in (made.weight, made.bias):
                if view is not None:
                    rows = view.of(parameter_of(values, view))
                    turned[view.parameter] = torch.zeros_like(parameter_of(values, view))
                    view.of(turned[view.parameter])[i], view.of(turned[view.parameter])[j] = -rows[j], rows[i]
            yield turned
