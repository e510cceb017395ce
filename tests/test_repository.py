"""Rules of the house that no linter knows: short files, silent libraries, links that lead somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("schedules", "partition", "pipeline")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def read(path: Path | str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(read(path)))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_packages_are_found() -> None:
    assert all(sources(package) for package in PACKAGES)


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=name)
def test_a_file_holds_one_idea(path: Path) -> None:
    text = read(path)
    assert len(text.splitlines()) <= 400, "split it: a file of the packages has at most 400 lines"
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "the first line says what the file is for"


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=name)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    functions = [node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [node.name for node in functions if (node.end_lineno or 0) - node.lineno + 1 > 60]
    assert not long, "split them: a function has at most 60 lines"


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=name)
def test_the_library_raises_errors_and_prints_nothing(path: Path) -> None:
    asserts = [node.lineno for node in nodes(path) if isinstance(node, ast.Assert)]
    prints = [
        node.lineno
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not asserts, f"raise an error of the package's errors.py instead of assert (lines {asserts})"
    assert not prints, f"return the text, or write it through rich in the command (lines {prints})"


@pytest.mark.parametrize("path", sources("schedules", "partition"), ids=name)
def test_only_pipeline_knows_torch(path: Path) -> None:
    imported = [alias.name for node in nodes(path) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in nodes(path) if isinstance(node, ast.ImportFrom)]
    assert not [module for module in imported if module.split(".")[0] == "torch"]


@pytest.mark.parametrize("path", pages(), ids=name)
def test_links_of_a_page_lead_somewhere(path: Path) -> None:
    targets = [target.split("#")[0] for target in LINK.findall(read(path))]
    files = [target for target in targets if target and not target.startswith(("http://", "https://"))]
    missing = [target for target in files if not (path.parent / target).exists()]
    assert not missing


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    linked = LINK.findall(read(folder / "README.md"))
    assert sorted(linked) == sorted(path.name for path in folder.glob("[0-9]*.md"))


def test_the_cases_name_tests_that_exist() -> None:
    from checks.cases import CASES, FOLDER

    defined = {file: read(FOLDER / file) for file in {case.file for case in CASES}}
    missing = [test for case in CASES for test in case.tests if f"def {test}(" not in defined[case.file]]
    assert not missing


def test_the_changelog_has_a_place_for_what_comes_next() -> None:
    text = read("CHANGELOG.md")
    assert re.search(r"^## Unreleased$", text, re.MULTILINE)


def test_constraints_cover_every_dependency() -> None:
    """Otherwise a set-up of next month is another one than that of today."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    pinned = re.findall(r"^([\w.-]+)==", read("constraints.txt"), re.MULTILINE)
    names = {re.split(r"[\[<>=!~ ]", line)[0].lower() for line in wanted}
    assert names <= {pin.lower() for pin in pinned}


def test_the_schedule_in_contributing_runs() -> None:
    """In a process of its own: it registers a schedule."""
    [code] = re.findall(r"```python\n(.*?)```", read("CONTRIBUTING.md"), re.DOTALL)
    code += """
import schedules
for row in schedules.build("one-at-a-time", ranks=2, micro_batches=2).rows:
    print(*row)
"""
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert printed == "0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1\n"
