"""Proves that imports point down, that importing runs nothing, and that one file knows of torch.distributed.

    python -m pytest tests/test_layout.py
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYER = {"gcd": 6, "cold_start": 5, "config": 4, "correction": 4, "judge": 3, "credit": 3, "update": 2, "rollout": 1,
         "algorithms": 0, "model": 0, "parallel": 0, "endpoint": 0, "envs": 0}
LEAVES = ("report", "bench", "studies")
TOP = sorted(ROOT.glob("*.py"))
ENVS = sorted((ROOT / "envs").glob("*.py"))
OTHERS = sorted(path for leaf in LEAVES for path in (ROOT / leaf).glob("*.py"))
EVERY = TOP + ENVS + OTHERS


def name(path):
    return str(path.relative_to(ROOT))


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path):
    """First part of every module's name that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: a relative import"
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.fast
def test_the_top_level_is_the_table():
    assert {path.stem for path in TOP} == {*LAYER, "report"} - {"envs"}


@pytest.mark.fast
@pytest.mark.parametrize("path", TOP, ids=name)
def test_imports_point_down(path):
    if path.stem in LEAVES:
        return                                   # a leaf may import what it likes
    for used in imports(path) & {*LAYER, *LEAVES}:
        assert used not in LEAVES, f"{name(path)} imports {used}, a leaf"
        assert LAYER[used] < LAYER[path.stem], f"{name(path)} imports {used}, which is not below it"


@pytest.mark.fast
@pytest.mark.parametrize("path", ENVS, ids=name)
def test_environments_import_environments_only(path):
    assert imports(path) & {*LAYER, *LEAVES} <= {"envs"}


@pytest.mark.fast
@pytest.mark.parametrize("path", EVERY, ids=name)
def test_nothing_imports_a_leaf(path):
    for leaf in set(LEAVES) & imports(path):
        assert path.parent.name == leaf, f"{name(path)} imports {leaf}"


@pytest.mark.fast
@pytest.mark.parametrize("path", [path for path in EVERY if path.name != "parallel.py"], ids=name)
def test_only_parallel_knows_torch_distributed(path):
    words = re.search(r"torch\.distributed|\bdist\.\w+|\bfsdp\b|\bDTensor\b", path.read_text(encoding="utf-8"))
    assert words is None, f"{name(path)}: {words[0]}"


@pytest.mark.fast
@pytest.mark.parametrize("path", EVERY, ids=name)
def test_a_file_opens_with_what_it_is(path):
    assert ast.get_docstring(tree(path)), f"{name(path)} has no docstring"


@pytest.mark.fast
@pytest.mark.parametrize("path", TOP + ENVS, ids=name)
def test_a_file_does_nothing_when_imported(path):
    """After the docstring: imports, definitions and constants; what runs stands under `if __name__ == "__main__"`."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in tree(path).body[1:]:
        main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        assert main or isinstance(node, allowed), f"{name(path)}:{node.lineno} runs at import"


@pytest.mark.fast
@pytest.mark.parametrize("path", TOP + ENVS, ids=name)
def test_no_function_is_longer_than_a_screen(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef) and node.name != "main":
            lines = node.end_lineno - node.lineno + 1
            assert lines <= 80, f"{name(path)}:{node.lineno} {node.name}: {lines} lines"


def test_importing_gcd_prints_nothing_and_writes_nothing(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", "import gcd"], cwd=tmp_path, env=environment, text=True,
                          capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
