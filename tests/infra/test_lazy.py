"""Tests of deferred imports: `--help` and wrong flags load no torch, and a deferred module works when used.

    python -m pytest tests/infra/test_lazy.py
"""

import subprocess
import sys

import pytest
from tiny_runs import ENVIRONMENT, ROOT

HEAVY = ("torch._C", "transformers", "tokenizers", "safetensors")


def python(*arguments, cwd=ROOT):
    """A finished Python process in the checkout, which succeeded."""
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=ENVIRONMENT, text=True, check=False,
                          capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def loaded_by(*arguments):
    """Full names of all modules that a Python process loads."""
    lines = python("-X", "importtime", *arguments).stderr.splitlines()
    return {line.split("|")[-1].strip() for line in lines if line.startswith("import time:")}


@pytest.mark.slow
def test_reading_the_flags_loads_no_torch():
    code = f"import config, sys; config.parse([]); print([m for m in {HEAVY} if m in sys.modules])"
    assert python("-c", code).stdout == "[]\n"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--algo", "gigpo"], ["--env", "alfworld"]], ids=" ".join)
def test_help_loads_no_torch(flags):
    modules = loaded_by("gcd.py", "--help", *flags)
    assert "config" in modules and "infra.flags" in modules       # the test sees the imports
    assert not modules & {*HEAVY}
    assert not [name for name in modules if name.startswith("torch.")]


@pytest.mark.slow
def test_a_wrong_value_loads_no_torch():
    code = ("import runpy, sys\n"
            "sys.argv = ['gcd.py', '--minibatches', '0']\n"
            "try: runpy.run_path('gcd.py', run_name='__main__')\n"
            f"except SystemExit as end: print(end.code, [m for m in {HEAVY} if m in sys.modules])")
    done = python("-c", code)
    assert done.stdout == "2 []\n" and done.stderr.startswith("gcd.py: error: --minibatches=0: ")


@pytest.mark.slow
def test_a_deferred_torch_works_when_it_is_used():
    code = ("import sys\n"
            "import config\n"
            "from algorithms import parallel, torch\n"
            "assert 'torch._C' not in sys.modules\n"
            "import torch.nn.functional as F\n"
            "linear = torch.nn.Linear(2, 1)\n"
            "print(F.relu(torch.tensor([-1.0, 2.0])).tolist(), parallel.all_sum(3), linear.weight.shape)")
    assert python("-c", code).stdout == "[0.0, 2.0] 3 torch.Size([1, 2])\n"


DEFERRED = """
import sys
sys.path.insert(0, {root!r})
from infra.lazy import deferred
with deferred("plain", "pack", "pack.inner", "broken"):
    import broken
    import pack
    import plain
    try:
        import absent
    except ModuleNotFoundError as error:
        print("absent:", error.name)
"""


@pytest.fixture
def modules(tmp_path):
    """A folder of modules that print when they are executed."""
    (tmp_path / "plain.py").write_text("print('run plain')\nvalue = 7\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("print('run pack')\n")
    (tmp_path / "pack" / "inner.py").write_text("print('run inner')\nvalue = 8\n")
    (tmp_path / "broken.py").write_text("value = 1\nimport no_such_module\n")
    return tmp_path


def run_in(folder, code):
    return python("-c", DEFERRED.format(root=str(ROOT)) + code, cwd=folder).stdout.splitlines()


def test_a_module_is_executed_once_at_its_first_use(modules):
    code = "print('first use'); print(plain.value, plain.value); import plain as p; print(p.value)"
    assert run_in(modules, code) == ["absent: absent", "first use", "run plain", "7 7", "7"]


def test_after_its_first_use_a_module_is_the_real_one(modules):
    """In the file that imported it, under the name that it has there: no later use is slower."""
    code = ("plain.value; pack.__path__\n"
            "print([type(module) is type(sys) for module in (plain, pack, broken)])")
    assert run_in(modules, code)[1:] == ["run plain", "run pack", "[True, True, False]"]


def test_importing_a_submodule_executes_its_package(modules):
    assert run_in(modules, "from pack.inner import value; print(value, pack.inner.value)") == [
        "absent: absent", "run pack", "run inner", "8 8"]


def test_a_module_that_fails_raises_its_own_error(modules):
    code = ("try: broken.value\n"
            "except ModuleNotFoundError as error: print(error.name)\n")
    assert run_in(modules, code) == ["absent: absent", "no_such_module"]


def test_imports_after_the_block_are_not_deferred(modules):
    (modules / "later.py").write_text("print('run later')\n")
    assert run_in(modules, "import later; print('end')") == ["absent: absent", "run later", "end"]
