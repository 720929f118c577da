"""The benchmarks: `./run bench NAME`. Their last results lie in bench/results."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
# Models, data and oracles are those of the tests.
sys.path.insert(0, str(ROOT / "tests"))
