"""What the documents say can be run is run, and what they point to is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_readmes_python_runs_and_shows_what_it_says(capsys: Any) -> None:
    (code,) = blocks("python")
    names: dict[str, Any] = {}
    exec(code, names)
    first, second = re.findall(r"geodesic-inv at rho=0.1: ([0-9.e-]+)", capsys.readouterr().out)
    assert float(first) > 0
    assert float(second) == pytest.approx(float(first), rel=1e-3)
    assert any("query-key GL(8) x 8" in group for group in names["m"].invariant_to)


def test_the_readmes_commands_are_those_of_run() -> None:
    usage = subprocess.run(["sh", ROOT / "run"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"^  (\w+) ", usage, flags=re.MULTILINE))
    named = set(re.findall(r"\./run (\w+)", README))
    assert {"demo", "test"} <= named <= known


def test_geosharp_measures_lists_what_the_readme_names() -> None:
    listed = subprocess.run([sys.executable, "-m", "geosharp", "measures"], capture_output=True, text=True, check=True).stdout
    for name in ("standard-l2", "adaptive-linf", "geodesic-inv-exact", "geodesic-mix-first-order", "average-geodesic-mix"):
        assert f"{name} " in listed


BUILD = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
"""


def test_the_readmes_commands_for_symmetries_run(tmp_path: Path) -> None:
    (tmp_path / "build.py").write_text(BUILD)
    names: dict[str, Any] = {}
    exec(BUILD, names)
    names["model"]().save_pretrained(tmp_path / "my-finetune")
    lines = [line.split("#")[0].split()[1:] for line in "".join(blocks("sh")).splitlines() if line.startswith(".venv/bin/geosharp")]
    assert [words[0] for words in lines] == ["symmetries", "symmetries"]
    for words in lines:
        run = subprocess.run([sys.executable, "-m", "geosharp", *words], capture_output=True, text=True, check=True, cwd=tmp_path)
        assert "3 blocks in use: rotary query-key GL(1, C) x 4, value-output GL(4) x 2, GLU neurons GL(1) x 20" in run.stdout
    assert "complete in 1 of 1 attention modules" in run.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in re.findall(r"`((?:tests|src|bench|docs)/[\w/.]+)`", text) if not (ROOT / path).exists()]
    assert not missing


def test_the_quick_demonstration_says_what_stayed_and_what_moved() -> None:
    run = subprocess.run([sys.executable, "-m", "geosharp", "demo", "--quick"], capture_output=True, text=True, check=True)
    assert "geodesic-inv" in run.stdout
    assert "adaptive-l2" in run.stdout
