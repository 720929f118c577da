"""Linear maps in a row: `nn.Sequential`, factorized embeddings.

Three instances: a bottleneck of two `nn.Linear`s (GL(r)); DeBERTa's and OPT's small embeddings with the map to the hidden
size (GL(e)); ALBERT's and ELECTRA's, where a layer norm stands between and its gain and bias are what meets the map
(GL(1) a channel).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from geosharp.symmetry.block import Factors
from geosharp.symmetry.features import LinearMap, join, linear_map
from geosharp.symmetry.layouts.feed_forward import between_maps
from geosharp.symmetry.layouts.projections import gain_of, gain_size
from geosharp.symmetry.reading import Reading
from geosharp.symmetry.view import View

_SILENT = (nn.Dropout, nn.Identity)


def sequence(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """Neighbouring linear maps of a sequence, with nothing or an activation that commutes with scaling between them."""
    if not isinstance(module, nn.Sequential):
        return []
    first: LinearMap | None = None
    between: list[nn.Module] = []
    readings: list[Reading] = []
    for path, child in module.named_children():
        found = linear_map(child, join(name, path))
        if found is None:
            between += [] if isinstance(child, _SILENT) else [child]
            continue
        if first is not None and len(between) < 2 and first.outputs == found.inputs:
            readings += between_maps(join(name, path, "inputs"), first, found, between[0] if between else None)
        first, between = found, []
    return [sum(readings, Reading(()))] if readings else []


# Factorized embeddings ------------------------------------------------------------------------------------------------

_TO_HIDDEN = ("embed_proj", "embedding_transformation", "project_in", "embeddings_project", "embedding_hidden_mapping_in")
_TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings", "embed_tokens")


def factorized(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """Embeddings narrower than the hidden size, and the map to it."""
    for path in _TO_HIDDEN:
        owner, prefix = _holder(module, name, path)
        found = None if owner is None else linear_map(getattr(owner, path), join(prefix, path))
        if found is not None and owner is not None:
            return _without_norm(name, module, found) or _behind_norm(name, module, found)
    return []


def _holder(module: nn.Module, name: str, path: str) -> tuple[nn.Module | None, str]:
    """The module that has the map as a child: this one, or its encoder (ALBERT)."""
    for owner, prefix in ((module, name), (getattr(module, "encoder", None), join(name, "encoder"))):
        if isinstance(owner, nn.Module) and isinstance(getattr(owner, path, None), nn.Module):
            return owner, prefix
    return None, ""


def _without_norm(name: str, module: nn.Module, to_hidden: LinearMap) -> list[Reading]:
    """Embeddings that are added up and mapped, or set side by side and mapped (MobileBERT)."""
    tables = {path: getattr(module, path, None) for path in _TABLES}
    found = {path: table for path, table in tables.items() if isinstance(table, nn.Embedding)}
    size = next((table.embedding_dim for table in found.values()), 0)
    if not size or to_hidden.inputs % size:
        return []
    sides = to_hidden.used().split(0, -1, size)
    right = tuple(sides[i].weight.mT for i in range(to_hidden.inputs // size))
    out = linear_map(getattr(module, "project_out", None), join(name, "project_out"))
    back = () if out is None or out.outputs != size else (out.made().weight.mT,)
    narrow = {path: table for path, table in found.items() if table.embedding_dim == size}
    words = dict(list(narrow.items())[:1])
    # Positions may be added before or after the map; the way back to the embeddings may end in the same table (OPT's tied head).
    tied = join(name, next(iter(words)), "weight")
    sets = [narrow] if list(narrow) == list(words) else [narrow, words]
    found_back = [Reading((_table_block(name, tables, (*right, *back)),), if_tied=tied) for tables in sets if back]
    return [*found_back, *(Reading((_table_block(name, tables, right),)) for tables in sets)]


def _table_block(name: str, tables: Mapping[str, nn.Embedding], right: tuple[View, ...]) -> Factors:
    left: list[View] = []
    carried: list[View] = []
    for path, table in tables.items():
        rows, pad = _without_padding(View(join(name, path, "weight")), table)
        left += rows
        carried += pad
    return Factors(join(name, "factorized"), tuple(left), right, kind="factorized embeddings", left_carried=tuple(carried))


def _without_padding(weight: View, table: nn.Embedding) -> tuple[list[View], list[View]]:
    """The rows that are coordinates, and the padding row: autograd masks its gradient, but the group moves it too."""
    row = table.padding_idx
    if row is None:
        return [weight], []
    rows = [weight[:row]] if row else []
    return [*rows, *([weight[row + 1 :]] if row + 1 < table.num_embeddings else [])], [weight[row : row + 1]]


def _behind_norm(name: str, module: nn.Module, to_hidden: LinearMap) -> list[Reading]:
    """Embeddings with a layer norm before the map: its gain and bias, channel by channel, are what meets the map."""
    path = join(name, "embeddings.LayerNorm")
    norm = getattr(getattr(module, "embeddings", None), "LayerNorm", None)
    gains = gain_of(norm, path) if isinstance(norm, nn.Module) else None
    if gains is None or not isinstance(norm, nn.Module) or gain_size(norm) != to_hidden.inputs:
        return []
    block = Factors(join(name, "factorized"), gains.scalars(), to_hidden.used().scalars(), kind="factorized embeddings")
    return [Reading((block,))]
