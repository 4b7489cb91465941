"""Draw docstrings and names at random, for a reader who has not seen the project: are they understood at
once?

    python -m lab.bench.draw_words --seed 1

Drawn are public functions, classes and methods of the product and the laboratory (no tests): 10 docstrings
with their signatures, and 30 names with their files alone.
"""

import argparse
import ast
import random

from lab.bench.study import ROOT


def definitions():
    """[(file, signature, name, docstring)] of all public functions, classes and methods with a docstring."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if file.startswith((".", "tests/", "runs/", "examples/")):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                kind = "class" if isinstance(node, ast.ClassDef) else "def"
                arguments = f"({ast.unparse(node.args)})" if kind == "def" else ""
                if text := ast.get_docstring(node):
                    found.append((file, f"{kind} {node.name}{arguments}", node.name, text))
    return found


def main(argv=None):
    """Print a draw."""
    parser = argparse.ArgumentParser("python -m lab.bench.draw_words", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    rng, found = random.Random(parser.parse_args(argv).seed), definitions()
    for file, signature, _, text in rng.sample(found, 10):
        print(f"{file}: {signature}\n    {text.replace(chr(10), chr(10) + '    ')}\n")
    for file, signature, _, _ in rng.sample(found, 30):
        print(f"{file}: {signature}")


if __name__ == "__main__":
    main()
