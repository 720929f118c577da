"""A norm between the soft-max and the output map, or on the values (BitNet's `attn_sub_norm`): its gains meet the output map.

The norm makes values and output no product; its gains and the output map's columns are one, feature by feature.
"""

from __future__ import annotations

from torch import nn

from geosharp.symmetry.between import value_norm
from geosharp.symmetry.block import Factors
from geosharp.symmetry.code import attends, sources
from geosharp.symmetry.features import join
from geosharp.symmetry.layouts.projections import adapted, gain_of, gain_size, output_map
from geosharp.symmetry.reading import Dropped, Reading


def context_norm(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """The gains of the norm whose result the output map reads."""
    path = value_norm(module)
    norm = getattr(module, path, None) if path else None
    size = gain_size(norm) if isinstance(norm, nn.Module) else None
    output = output_map(module, name, None, size) if size else None
    if output is None or not isinstance(norm, nn.Module) or not attends(module):
        return []
    gains, leaf = gain_of(norm, join(name, path)), output.path.removeprefix(f"{name}.").partition(".")[0]
    if gains is None or path not in sources(module).get(leaf, ()):
        return []
    label, reason = join(name, "context_gains"), adapted(output)
    if reason:
        return [Reading((), (Dropped(label, reason),))]
    return [Reading((Factors(label, gains.scalars(), output.used().scalars(), kind="context gains"),))]
