"""Tests of finding plug-ins: a class by its file's name or path, and one clear line for everything wrong.

    python -m pytest tests/infra/test_plugins_find.py

They use a small package of their own, `shelf`, with the base class Tool. Whole runs with plug-ins are in
tests/core/test_plugins.py.
"""

import hashlib
import importlib
import sys

import pytest

from infra import plugins

BASE = '''"""The package."""


class Tool:
    size: int = 1
    name = "tool"

    def use(self):
        return self.name
'''
KNOWN = """import shelf


class Tool(shelf.Tool):
    name = "known"
"""


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """The package `shelf`, with plug-in `known`, a helper file and a file that is not a plug-in."""
    folder = tmp_path / "tree" / "shelf"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(BASE)
    (folder / "known.py").write_text(KNOWN)
    (folder / "other.py").write_text("class Other:\n    pass\n")
    (folder / "_helper.py").write_text(KNOWN)
    monkeypatch.syspath_prepend(str(folder.parent))
    before = {*sys.modules}
    path = [*sys.path]
    yield importlib.import_module("shelf")
    sys.path[:] = path
    for name in {*sys.modules} - before:
        del sys.modules[name]


@pytest.fixture
def outside(tmp_path):
    """A folder outside the package, for plug-in files."""
    folder = tmp_path / "outside"
    folder.mkdir()
    return folder


def find(shelf, value):
    return plugins.find(shelf, shelf.Tool, "--tool", str(value))


def error_of(shelf, value):
    """The error of finding a plug-in: one line that names flag and value."""
    with pytest.raises(ValueError) as raised:
        find(shelf, value)
    message = str(raised.value)
    assert message.startswith(f"--tool={value}: ") and "\n" not in message
    return message.removeprefix(f"--tool={value}: ")


# Good plug-ins

def test_a_name_is_found_in_the_package(shelf):
    assert find(shelf, "known")().use() == "known"
    assert plugins.names(shelf, shelf.Tool) == ["known"]


def test_the_path_of_a_file_in_the_package_is_the_same_class(shelf):
    path = f"{shelf.__path__[0]}/known.py"
    assert find(shelf, path) is find(shelf, "known")


def test_a_file_outside_is_found_and_imported_once(shelf, outside, capsys, monkeypatch):
    (outside / "mine.py").write_text(
        "import shelf\nprint('imported')\n\n"
        "class Tool(shelf.Tool):\n    name = 'mine'\n    size: int = 3\n    _note = 'private'\n\n"
        "    def use(self):\n        return self._twice()\n\n"
        "    def _twice(self):\n        return 2 * self.name\n")
    found = find(shelf, outside / "mine.py")
    assert found().use() == "minemine" and found.__mro__[1] is shelf.Tool
    monkeypatch.chdir(outside)
    assert find(shelf, "mine.py") is found and find(shelf, "../outside/mine.py") is found
    assert capsys.readouterr().out == "imported\n"


def test_a_file_that_was_edited_is_imported_again(shelf, outside, monkeypatch):
    """In a notebook, say: else the old code would run under the new file's hash. Python takes the bytecode it
    stored for a file of the same second and size.
    """
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    text = "import shelf\n\n\nclass Tool(shelf.Tool):\n    size = 3\n"
    (outside / "mine.py").write_text(text)
    assert find(shelf, outside / "mine.py").size == 3
    (outside / "mine.py").write_text(text.replace("3", "4"))
    assert find(shelf, outside / "mine.py").size == 4


def test_two_files_of_one_name_in_two_folders_are_two_plugins(shelf, outside):
    for folder in ("a", "b"):
        (outside / folder).mkdir()
        (outside / folder / "mine.py").write_text(KNOWN.replace("known", folder))
    assert [find(shelf, outside / folder / "mine.py").name for folder in ("a", "b", "a")] == ["a", "b", "a"]


def test_a_file_outside_may_import_a_sibling(shelf, outside):
    (outside / "sibling_of_mine.py").write_text("NAME = 'from the sibling'\n")
    (outside / "mine.py").write_text(
        "import shelf\nfrom sibling_of_mine import NAME\n\n\nclass Tool(shelf.Tool):\n    name = NAME\n")
    assert find(shelf, outside / "mine.py").name == "from the sibling"


def test_a_class_may_inherit_from_a_plugin_of_the_package(shelf, outside):
    (outside / "mine.py").write_text(
        "from shelf import known\n\n\nclass Tool(known.Tool):\n    name = 'mine'\n")
    assert find(shelf, outside / "mine.py")().use() == "mine"


def test_the_content_hash_changes_with_the_file(outside):
    path = outside / "mine.py"
    path.write_text(KNOWN)
    before = plugins.content_hash(str(path))
    assert before == hashlib.sha256(KNOWN.encode()).hexdigest()[:16]
    path.write_text(KNOWN + "# changed\n")
    assert plugins.content_hash(str(path)) not in (before, None)
    assert plugins.content_hash("known") is None


def test_a_path_is_named_by_its_stem():
    assert [plugins.name_of(value) for value in ("known", "a/known.py", "known.py")] == ["known"] * 3


# Bad input

@pytest.mark.parametrize("name", ["hammer", "", "_helper", "../outside/mine", "known.Tool", "__init__"])
def test_an_unknown_name_lists_the_known_ones(shelf, name):
    assert error_of(shelf, name) == "expected one of known, or a file's path that ends in .py"


def test_a_path_that_does_not_exist(shelf, outside):
    for name in ("absent", "x" * 300):
        assert error_of(shelf, outside / f"{name}.py") == "no such file"


def test_a_path_that_is_a_folder(shelf, outside):
    (outside / "folder.py").mkdir()
    assert error_of(shelf, outside / "folder.py") == "is a folder"


@pytest.mark.parametrize("code, line, reason", [
    ("import shelf\nvalue = 1 / 0\n", 2, "ZeroDivisionError: division by zero"),
    ("import shelf\n\nimport no_such_module\n", 3, "ModuleNotFoundError: No module named 'no_such_module'"),
    ("import shelf\n\n\nclass Tool(shelf.Tool)\n    pass\n", 4, "SyntaxError: expected ':'"),
    ("def f():\n    raise RuntimeError('two\\nlines')\n\n\nf()\n", 2, "RuntimeError: two lines"),
    ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3"),
    ("import bad_sibling\n", 1, "KeyError: 'x'")],
    ids=["error", "import", "syntax", "function", "exit", "sibling"])
def test_a_file_that_does_not_import_names_its_own_error_and_line(shelf, outside, code, line, reason):
    (outside / "bad_sibling.py").write_text("\n\n\n{}['x']\n")
    path = outside / "mine.py"
    path.write_text(code)
    for _ in range(2):                                 # the failed import leaves nothing behind
        message = error_of(shelf, path)
        assert message.startswith(f"cannot import {path}, line {line}: {reason}")
    path.write_text(KNOWN)
    assert find(shelf, path).name == "known"


@pytest.mark.parametrize("code", [
    "", "class Other:\n    pass\n", "Tool = 3\n", "class Tool:\n    pass\n", "from shelf import Tool\n"],
    ids=["empty", "another name", "not a class", "not derived", "only the base"])
def test_a_file_without_the_class(shelf, outside, code):
    (outside / "mine.py").write_text(code)
    assert error_of(shelf, outside / "mine.py") == f"{outside}/mine.py has no class Tool(shelf.Tool)"


def test_a_file_in_the_package_without_the_class(shelf):
    assert error_of(shelf, "other") == "shelf/other.py has no class Tool(shelf.Tool)"


def test_a_file_that_shares_a_name_with_the_package(shelf, outside):
    (outside / "known.py").write_text(KNOWN)
    assert error_of(shelf, outside / "known.py") == "shelf/known.py has the same name; rename the file"


@pytest.mark.parametrize("body, names", [
    ("    nmae = 'mine'\n", "nmae"),
    ("    def usage(self):\n        pass\n", "usage"),
    ("    weight: float\n    _fine: int = 1\n", "weight"),
    ("    b = 1\n    a = 2\n    name = 'fine'\n", "a, b")], ids=["attribute", "method", "annotation", "two"])
def test_a_public_name_that_the_base_does_not_declare(shelf, outside, body, names):
    (outside / "mine.py").write_text(f"import shelf\n\n\nclass Tool(shelf.Tool):\n{body}")
    assert error_of(shelf, outside / "mine.py") == (
        f"class Tool defines {names}, which shelf.Tool does not declare, so nothing reads it; a helper's "
        "name begins with an underscore")


def test_an_undeclared_name_between_the_class_and_the_base_is_found(shelf, outside):
    (outside / "mine.py").write_text("import shelf\n\n\nclass Middle(shelf.Tool):\n    extra = 1\n\n\n"
                                     "class Tool(Middle):\n    pass\n")
    assert "defines extra, which" in error_of(shelf, outside / "mine.py")
