from geosharp.api import compare as compare
from geosharp.api import measure as measure
from geosharp.api import pull_back as pull_back
from geosharp.api import reparametrize as reparametrize
from geosharp.api import sharpness as sharpness
from geosharp.api import symmetries as symmetries
from geosharp.api import verify as verify
from geosharp.errors import GeosharpError as GeosharpError
from geosharp.errors import RankError as RankError
from geosharp.errors import SymmetryError as SymmetryError
from geosharp.geometry.build import Geometry as Geometry
from geosharp.measurement import Measurement as Measurement
from geosharp.measurement import Measurements as Measurements
from geosharp.measures import Measure as Measure
from geosharp.measures import register as register
from geosharp.symmetry.discover import Found as Found
from geosharp.symmetry.factors import Factors as Factors
from geosharp.symmetry.translation import Translation as Translation
from geosharp.symmetry.view import ComplexView as ComplexView
from geosharp.symmetry.view import View as View

__version__: str
