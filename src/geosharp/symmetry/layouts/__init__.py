"""One file per way of writing attention. A layout looks at a module's structure and config, never at full names."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from geosharp.symmetry.layouts.fused_transposed import fused_transposed
from geosharp.symmetry.layouts.separate import separate
from geosharp.symmetry.site import AttentionSite

Layout = Callable[[str, nn.Module], AttentionSite | None]

LAYOUTS: dict[str, Layout] = {
    "separate": separate,
    "fused-transposed": fused_transposed,
}
"""Name -> function of (module name, module) that returns the attention layer it recognizes there, or None."""
