"""Feed-forward layers whose hidden neurons can be re-scaled.

Three instances: a gated layer (SwiGLU, GEGLU), where the linear half and the output are a product, neuron by neuron; a
ReLU layer, where only positive factors pass the non-linearity; two linear maps with nothing between, where GL(r) acts.
What an activation commutes with is seen by calling it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from geosharp.symmetry.between import added_maps, neuron_norm
from geosharp.symmetry.block import Factors
from geosharp.symmetry.code import names_used
from geosharp.symmetry.features import Features, LinearMap, join, linear_map
from geosharp.symmetry.layouts.projections import adapted, common, gain_of, map_at
from geosharp.symmetry.reading import Dropped, Known, Reading

_GATED = (
    ("gate_proj", "up_proj", "down_proj"), ("wi_0", "wi_1", "wo"), ("w1", "w3", "w2"), ("w_gate", "w_up", "w_down"),
    ("gate", "up", "down"),
)  # fmt: skip
"""Names of the half that goes through the activation, the linear half, the output."""

_GATED_FUSED = (
    ("gate_up_proj", "down_proj"), ("Wi", "Wo"), ("weights_in", "weights_out"), ("input_linear", "output_linear"), ("w12", "w3"),
    ("fc1", "fc2"), ("gate_and_up", "down"), ("wi", "wo"), ("linear_in", "linear_out"),
)  # fmt: skip
"""Names of a map to both halves, the activated one first, and of the output."""


def feed_forward(name: str, module: nn.Module, parent: nn.Module | None) -> list[Reading]:
    """The neurons of one feed-forward layer, in the readings that its structure leaves open."""
    gated = _gated(name, module) or _gated_fused(name, module)
    found = gated or _plain(name, module)
    reason = _broken(module, gated=bool(gated)) if found else ""
    if not reason:
        return found
    return [Reading(tuple(_gains(name, module, found[0])), tuple(Dropped(block.name, reason) for block in found[0].blocks))]


def _gains(name: str, module: nn.Module, found: Reading) -> Iterator[Factors]:
    """The gains of a norm on the neurons meet the map that reads them, neuron by neuron."""
    path = neuron_norm(module)
    norm = getattr(module, path, None) if path else None
    gains = gain_of(norm, join(name, path)) if isinstance(norm, nn.Module) else None
    for block in found.blocks:
        if gains is not None and isinstance(block, Factors):
            yield Factors(f"{block.name}_gains", gains.scalars(), block.right, kind="neuron gains")


def _broken(module: nn.Module, *, gated: bool) -> str:
    """What else is done with the neurons, or with the maps to them, or nothing."""
    if name := neuron_norm(module):
        return f"{name} normalizes the neurons"
    if name := added_maps(module):
        return f"{name} adds further maps to the neurons"
    # A plain layer is often written together with what follows it, which half precision has clamped.
    return "the linear half is clamped" if gated and names_used(module) & {"clamp", "clip", "clamp_"} else ""


def _gated(name: str, module: nn.Module) -> list[Reading]:
    for names in _GATED:
        gate, up, down = (map_at(module, name, path) for path in names)
        if gate is not None and up is not None and down is not None and gate.outputs == up.outputs == down.inputs:
            return [neurons(f"{common(up.path, down.path)}.neurons", "GLU neurons", half, down) for half in (up, gate)]
    return []


def _gated_fused(name: str, module: nn.Module) -> list[Reading]:
    for names in _GATED_FUSED:
        both, down = (map_at(module, name, path) for path in names)
        if both is not None and down is not None and both.outputs == 2 * down.inputs:
            made, half = both.made(), down.inputs
            label, reason = f"{common(both.path, down.path)}.neurons", adapted(both, down)
            if reason:
                return [Reading((), (Dropped(label, reason),))]
            halves = (made[half:], made[:half])
            return [Reading((neuron_block(label, "GLU neurons", one, down.used(), "linear"),)) for one in halves]
    return []


def _plain(name: str, module: nn.Module) -> list[Reading]:
    """Two maps, one after the other among a module's own children (or its children's `dense`), with one activation."""
    own = [(path, child) for path, child in module.named_children()]
    maps = [found for path, child in own if (found := linear_map(child, join(name, path))) is not None]
    activation = activation_of(module)
    if isinstance(module, nn.Sequential):
        return []  # a layout of its own
    if not maps and isinstance(getattr(module, "intermediate", None), nn.Module):
        inner = module.intermediate
        maps = [one for path in ("intermediate.dense", "output.dense") if (one := map_at(module, name, path)) is not None]
        activation = activation_of(inner)  # type: ignore[arg-type]
    if len(maps) != 2 or activation is None or maps[0].outputs != maps[1].inputs:
        return []
    return between_maps(f"{common(maps[0].path, maps[1].path)}.neurons", maps[0], maps[1], activation)


def between_maps(name: str, first: LinearMap, second: LinearMap, activation: Callable[[Tensor], Tensor] | None) -> list[Reading]:
    """The symmetries of the features between two maps with an activation, or nothing, between them."""
    kind = "linear" if activation is None else commutes_with(activation)
    if kind == "nothing":
        return []
    if kind == "positive":
        return [neurons(name, "ReLU neurons", first, second, "positive")]
    return [product(name, first.made(), (second.used(),), adapted(first, second), sizes=(first.inputs, first.outputs, second.outputs))]


def product(name: str, made: Features, used: tuple[Features, ...], reason: str = "", *, sizes: tuple[int, int, int]) -> Reading:
    """GL(r) on the features between two linear maps, where these are not more than the product's rank can be."""
    rows, width, columns = sizes
    if reason:
        return Reading((), (Dropped(name, reason),))
    right = tuple(view for one in used for view in one.matrix())
    block = Factors(name, made.matrix(), right, kind="product")
    if width > min(rows + (made.bias is not None), columns):
        why = f"{width} features between {rows} and {columns}: the product's rank is lower, so its quotient is no manifold"
        return Reading((), (), (Known(name, "product", f"GL({width})", width * width, why, block.tangents),))
    return Reading((block,))


def neurons(name: str, kind: str, made: LinearMap, used: LinearMap, group: str = "linear") -> Reading:
    """One copy of width 1 a neuron, unless an adapter stands on one of the maps."""
    reason = adapted(made, used)
    return Reading((), (Dropped(name, reason),)) if reason else Reading((neuron_block(name, kind, made.made(), used.used(), group),))


def neuron_block(name: str, kind: str, made: Features, used: Features, group: str) -> Factors:
    """One copy of width 1 a neuron."""
    return Factors(name, made.scalars(), used.scalars(), group=group, kind=kind)  # type: ignore[arg-type]


def activation_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The activation of a module: a child or attribute with `act` in its name, one of PyTorch's, or the function in its forward pass."""
    return next(_activations(module), None)


def _activations(module: nn.Module) -> Iterator[Any]:
    for names in (module._modules, vars(module)):
        for name, value in names.items():
            named = name.startswith("act") or "_act" in name
            if named and callable(value) and not isinstance(value, (type, nn.Dropout)):
                yield value
    yield from (child for child in module.children() if type(child).__module__ == "torch.nn.modules.activation")
    if "relu" in names_used(module):
        yield torch.relu


def commutes_with(activation: Callable[[Tensor], Tensor]) -> str:
    """What may be taken through an activation: "linear" maps, "positive" factors, or "nothing"."""
    sizes = torch.logspace(-3, 5, 41)  # beyond where some activations are cut off
    x = torch.cat([-sizes, torch.zeros(1), sizes])
    try:
        with torch.no_grad():
            y, double, mirrored = (activation(factor * x) for factor in (1, 2, -1))
    except Exception:  # whatever it needs, it is not a plain function of one number
        return "nothing"
    if not all(isinstance(value, Tensor) and value.shape == x.shape for value in (y, double, mirrored)):
        return "nothing"
    if not torch.allclose(double, 2 * y, rtol=1e-5, atol=1e-6) or not bool(y.any()):
        return "nothing"
    return "linear" if torch.allclose(mirrored, -y, rtol=1e-5, atol=1e-6) else "positive"
