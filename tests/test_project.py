"""The shape of the project: which way imports point, what stays light, what is packaged, and how long things get."""

import ast
import csv
import importlib.resources
import json
import os
import re
import subprocess
import sys
import tomllib
import unicodedata
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pagedgen import SamplingParams

ROOT = Path(__file__).resolve().parent.parent

# Area -> the areas it may import. "values" are the plain modules every half may use.
ALLOWED: dict[str, set[str]] = {
    "kernels": set(),
    "values": set(),
    "api": {"values", "engine"},
    "scheduling": {"values"},
    "text": {"values"},
    "data": {"values"},
    "stats": {"values"},
    "execution": {"values", "kernels", "models.base"},
    "models.base": {"values", "kernels", "execution"},
    "models": {"values", "kernels", "execution", "models.base"},
    "admission": {"values", "scheduling", "text"},
    "observer": {"values", "scheduling", "stats"},
    "simulation": {"values", "scheduling", "observer", "stats"},
    "quantizing": {"values", "execution", "models", "models.base", "text"},
    "pipeline": {"values", "scheduling", "execution", "observer", "stats"},
    "engine": {
        "values",
        "admission",
        "quantizing",
        "pipeline",
        "scheduling",
        "execution",
        "models",
        "models.base",
        "text",
        "stats",
    },
    "job_setup": {"values", "data", "text"},
    "planning": {
        *(
            "values",
            "admission",
            "simulation",
            "scheduling",
            "execution",
            "models",
            "text",
            "data",
            "stats",
            "job_setup",
        ),
    },
    "job": {"values", "api", "engine", "text", "data", "stats", "models", "job_setup", "planning"},
    "reports": {"values", "data", "stats"},
    "options": {"values"},
    "cli": {"values", "api", "options", "job", "reports", "planning"},
    "entry": {"cli"},
    "__main__": {"entry"},
}
VALUES = {
    "beam_params",
    "errors",
    "config",
    "interrupts",
    "params",
    "process",
    "request",
    "standard_streams",
    "step",
    "units",
    "user_state",
}

JOB = {"job", "resume", "run_log", "run_record"}


def area(module: str) -> str:
    """The area of one of our modules, named in full: `pagedgen.models.llama` is in "models"."""
    package, *rest = module.split(".")
    if package == "pagedgen_kernels":
        return "kernels"
    if not rest:
        return "api"
    if rest[:2] == ["models", "base"]:
        return "models.base"
    if rest[0] in JOB:
        return "job"
    return "values" if rest[0] in VALUES else rest[0]


def ours(module: str) -> bool:
    return module.split(".")[0] in ("pagedgen", "pagedgen_kernels")


def modules() -> dict[str, Path]:
    """The full name of each module of the package and of the kernels -> its file."""
    found: dict[str, Path] = {}
    for folder, package in ((ROOT / "pagedgen", "pagedgen"), (ROOT / "kernels", "pagedgen_kernels")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


def imported(module: str, is_package: bool, source: str, known: set[str]) -> set[str]:
    """Every module of ours that `source` imports, wherever in it, by its full name."""
    result: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
                base = ".".join((*parents, *([base] if base else [])))
            for alias in node.names:
                name = f"{base}.{alias.name}"
                result.add(name if name in known else base)
    return {name for name in result if ours(name)}


def new_directions(sources: dict[str, tuple[bool, str]]) -> list[str]:
    """The imports that ALLOWED does not list. sources: module -> (whether it is a package, its text)."""
    problems = []
    for module, (is_package, source) in sources.items():
        here = area(module)
        for target in sorted(imported(module, is_package, source, set(sources))):
            there = area(target)
            if there != here and there not in ALLOWED.get(here, set()):
                problems.append(f"{module} imports {target}: {here} -> {there}")
    return problems


def real_sources() -> dict[str, tuple[bool, str]]:
    return {name: (path.name == "__init__.py", path.read_text("utf-8")) for name, path in modules().items()}


def test_imports_point_one_way() -> None:
    sources = real_sources()
    assert len(sources) > 10
    assert {area(name) for name in sources} <= set(ALLOWED), "a new area needs a row in ALLOWED"
    assert new_directions(sources) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("pagedgen.scheduling.scheduler", "from pagedgen.execution.batch import build_batch"),
        ("pagedgen.execution.runner", "import pagedgen.scheduling.blocks"),
        ("pagedgen.execution.runner", "from pagedgen import engine"),
        ("pagedgen.execution.runner", "from ..job import run_job"),
        ("pagedgen.text.tokenizer", "def f():\n    from pagedgen import models"),
        ("pagedgen.data", "from ..execution import batch"),
        ("pagedgen_kernels.reference", "from pagedgen import errors"),
        ("pagedgen.engine", "from . import job"),
    ],
)
def test_a_new_direction_is_noticed(module: str, line: str) -> None:
    sources = {name: (package, "") for name, (package, _) in real_sources().items()}
    sources |= {"pagedgen.engine": (False, ""), "pagedgen.job": (False, "")}
    assert new_directions(sources) == []
    sources[module] = (module == "pagedgen.data", line)
    assert len(new_directions(sources)) == 1


def run_python(code: str, cwd: Path = ROOT, **env: str) -> str:
    """What `code` prints in a new interpreter started in `cwd`."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_real_kernels_package_wins_in_the_repository_root(tmp_path: Path) -> None:
    """Transformers imports a third-party package `kernels`; our folder of that name must not be taken for it."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("real = True\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.real)"
    assert run_python(code).split() == ["True"]


def test_our_kernels_folder_is_no_package_of_that_name() -> None:
    code = (
        "import importlib.util; spec = importlib.util.find_spec('kernels'); print(spec.origin if spec else None)\n"
        "from transformers.utils.import_utils import is_kernels_available; print(is_kernels_available())"
    )
    origin, available = run_python(code).splitlines()
    assert not origin.startswith(str(ROOT))
    assert (origin, available) == ("None", "False") or "site-packages" in origin
    assert run_python("import pagedgen_kernels.reference as r; print(r.__file__)").strip().startswith(str(ROOT))


BLOCKER = """
import importlib, pkgutil, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ImportError(name + ' is blocked')
sys.meta_path.insert(0, Blocker())
"""
HEAVY = ("torch", "transformers", "datasets", "pyarrow", "pagedgen_kernels")


def test_the_policy_half_needs_no_torch() -> None:
    code = BLOCKER.format(blocked=HEAVY) + (
        "import pagedgen.step, pagedgen.request, pagedgen.config, pagedgen.errors, pagedgen.scheduling as s\n"
        "names = [m.name for m in pkgutil.walk_packages(s.__path__, 'pagedgen.scheduling.')]\n"
        "[importlib.import_module(n) for n in names]; print(len(names))"
    )
    assert int(run_python(code)) >= 2


def test_the_blocker_blocks() -> None:
    code = BLOCKER.format(blocked=HEAVY) + "import pagedgen.execution.batch"
    with pytest.raises(AssertionError, match="torch is blocked"):
        run_python(code)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['pagedgen', 'run', '--help']\n"
        "from pagedgen.cli import app\n"
        "try:\n    app()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"print('LOADED', sorted(set(sys.modules) & {set(HEAVY)!r}))"
    )
    shown = run_python(code)
    assert "--max-tokens" in shown
    assert shown.splitlines()[-1] == "LOADED []"


def function_lengths(path: Path) -> Iterator[tuple[str, int]]:
    """The name and the lines of the body of each function; a command's options, all in its signature, do not count."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            last = node.body[-1].end_lineno
            assert last is not None
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", last - node.body[0].lineno + 1


def test_files_and_functions_stay_short() -> None:
    sources = [*modules().values(), *(ROOT / "kernels").rglob("*.cpp"), *(ROOT / "kernels").rglob("*.h")]
    files = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in sources}
    assert {name: lines for name, lines in files.items() if lines > 400} == {}
    functions = dict(length for path in modules().values() for length in function_lengths(path))
    assert {name: lines for name, lines in functions.items() if lines > 60} == {}


def test_sources_name_no_path_of_a_machine() -> None:
    machine = re.compile(r"(?<![\w.}/-])/(?:work|root|home|Users|opt|mnt|srv)/\w")
    assert machine.search("see '/ro" + "ot/x'") is not None
    folders = ("pagedgen", "kernels", "tests", "benchmarks", "sample_prompts", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file() and path.suffix in ("", ".toml", ".md")]
    caches = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}
    files = [path for path in files if not caches & set(path.parts) and path.suffix != ".parquet"]
    texts = {path: path.read_text("utf-8") for path in files}
    assert len(texts) > 20
    found = [str(path.relative_to(ROOT)) for path, text in texts.items() if machine.search(text)]
    assert found == []


def test_every_package_and_data_file_is_packaged() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    folders = {"pagedgen": ROOT / "pagedgen", "pagedgen_kernels": ROOT / "kernels"}
    wanted = {"pagedgen.sample_prompts"}
    data: dict[str, list[Path]] = {"pagedgen.sample_prompts": [*(ROOT / "sample_prompts").iterdir()]}
    for package, folder in folders.items():
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                name = ".".join((package, *path.parent.relative_to(folder).parts))
                wanted.add(name)
                data.setdefault(name, []).append(path)
    assert set(setuptools["packages"]) == wanted
    for package, paths in data.items():
        globs = setuptools["package-data"].get(package, [])
        for path in (path for path in paths if path.is_file() and path.suffix != ".py"):
            assert any(path.match(glob) for glob in globs), f"{path.name} of {package} is in no package-data"


def sample_prompts() -> list[dict[str, Any]]:
    text = importlib.resources.files("pagedgen.sample_prompts").joinpath("prompts.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def text_of(row: dict[str, Any]) -> str:
    return row["prompt"] if "prompt" in row else "\n".join(message["content"] for message in row["messages"])


def test_sample_prompts_are_usable() -> None:
    rows = sample_prompts()
    assert len(rows) >= 24
    assert len({row["id"] for row in rows}) == len(rows)
    params = {field.name for field in fields(SamplingParams)}
    for row in rows:
        assert len(row.keys() & {"prompt", "messages"}) == 1, row["id"]
        assert row.keys() - {"id", "category", "prompt", "messages"} <= params, row["id"]
        assert row["category"], row["id"]
        assert 0 < len(text_of(row)) < 4000, row["id"]
        roles = [message["role"] for message in row.get("messages", [])]
        turns = roles[1:] if roles[:1] == ["system"] else roles
        assert turns == (["user", "assistant"] * len(turns))[: len(turns)], row["id"]
        assert "prompt" in row or turns[-1] == "user", row["id"]


def test_sample_prompts_are_varied() -> None:
    rows = sample_prompts()
    letters = {unicodedata.name(c).split()[0] for row in rows for c in text_of(row) if c.isalpha()}
    assert letters >= {"LATIN", "CJK", "ARABIC", "DEVANAGARI", "CYRILLIC", "HIRAGANA", "HANGUL", "GREEK"}
    used = set().union(*rows)
    assert used >= {"prompt", "messages", "temperature", "max_tokens", "stop", "seed"}
    assert {"chat", "completion", "code", "multilingual", "shared-prefix"} <= {row["category"] for row in rows}
    shared = [json.dumps(row["messages"], ensure_ascii=False) for row in rows if row["category"] == "shared-prefix"]
    assert len(shared) >= 6
    same = next(i for i, characters in enumerate(zip(*shared, strict=False)) if len(set(characters)) > 1)
    assert same > 1500


def test_sample_questions_are_a_csv_with_quoting() -> None:
    source = importlib.resources.files("pagedgen.sample_prompts").joinpath("questions.csv").read_text("utf-8")
    rows = list(csv.DictReader(source.splitlines(keepends=True)))
    assert len(rows) >= 12
    assert all(set(row) == {"id", "prompt", "category"} and all(row.values()) for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    for character in (",", "\n", '"'):
        assert any(character in row["prompt"] for row in rows)
