"""Sharpness of trained networks that does not change when parameters are rewritten without changing the function.

>>> import geosharp as gs
>>> gs.__version__
'0.1.0'
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_WHERE = {
    "sharpness": "api",
    "measure": "api",
    "compare": "api",
    "symmetries": "api",
    "verify": "api",
    "reparametrize": "api",
    "pull_back": "api",
    "Measure": "measures",
    "register": "measures",
    "Geometry": "geometry.build",
    "Measurement": "measurement",
    "Measurements": "measurement",
    "Found": "symmetry.discover",
    "Factors": "symmetry.factors",
    "Translation": "symmetry.translation",
    "View": "symmetry.view",
    "ComplexView": "symmetry.view",
    "GeosharpError": "errors",
    "SymmetryError": "errors",
    "RankError": "errors",
}
"""Public name -> module: `import geosharp` stays light (PEP 562). The stub beside this file is what type checkers read."""

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> object:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"geosharp.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'geosharp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
