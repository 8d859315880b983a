"""Which first-party files a module's code comes from, found without importing anything.

Used for things that must agree: a working folder's key (other code never resumes this code's
work), what records say of the code, and the test that holds dvc.yaml's deps against the real
imports.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from eagle3.workspace import digest_file

FIRST_PARTY = ("eagle3", "stages", "experiments")

# Code that cannot change a stage's results: an edit reruns nothing.
WITHOUT_EFFECT = (
    "eagle3/__init__.py",
    "eagle3/errors.py",
    "eagle3/ranks.py",
    "eagle3/reading.py",
    "eagle3/settings.py",
    "eagle3/tracking.py",
    "eagle3/workspace.py",
    "stages/__init__.py",
    "stages/closure.py",
    "stages/dvc_files.py",
    "stages/fitting.py",
    "stages/notes.py",
    "stages/outside.py",
    "stages/params.py",
    "stages/provenance.py",
    "stages/runner.py",
    "stages/sending.py",
    "stages/signals.py",
    "stages/system_metrics.py",
    "stages/tables.py",
    "stages/tracking.py",
)


def _file_of(root: Path, module: str) -> Path | None:
    base = root / Path(*module.split("."))
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _imported(path: Path, package: list[str]) -> Iterator[str]:
    """Dotted names that a file imports, those inside functions too, those for types only not."""
    waiting: list[ast.AST] = [ast.parse(path.read_bytes())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join(above + (node.module.split(".") if node.module else []))
            yield base
            # `from eagle3 import decode` names a module, `from eagle3.decode import f` does not.
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif not isinstance(node, ast.expr):  # most of a file, and none of it imports
            waiting += ast.iter_child_nodes(node)


def closure(root: Path, module: str) -> set[Path]:
    """Files of the project, relative to `root`, that `module` imports, itself included."""
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name.split(".")[0] not in FIRST_PARTY:
            continue
        path = _file_of(root, name)
        if path is None or path.relative_to(root) in found:
            continue
        found.add(path.relative_to(root))
        parts = name.split(".")
        package = parts if path.name == "__init__.py" else parts[:-1]
        waiting.extend(_imported(path, package))
        # Importing a.b.c runs a/__init__.py and a/b/__init__.py too.
        waiting.extend(".".join(parts[:n]) for n in range(1, len(parts)))
    return found


def code_of(root: Path, module: str) -> list[Path]:
    """The files whose edit may change what `module` computes, relative to `root`, sorted.

    Files beside the code that are not Python (a page's template) count as imported with it.
    """
    code = {path for path in closure(root, module) if path.as_posix() not in WITHOUT_EFFECT}
    data = {
        path.relative_to(root)
        for folder in {path.parent for path in code}
        for path in (root / folder).iterdir()
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    return sorted(code | data)


def code_digests(root: Path, *modules: str) -> dict[str, str]:
    """SHA-256 of the files whose edit may change what some modules compute, by path, sorted."""
    files = sorted({path for module in modules for path in code_of(root, module)})
    return {str(path): digest_file(root / path) for path in files}


def main() -> None:
    """`python -m stages.closure train`: the code deps of a stage, as dvc.yaml wants them."""
    for name in sys.argv[1:]:
        print(f"# stages.{name}")
        for path in code_of(Path.cwd(), f"stages.{name}"):
            print(f"      - {path.as_posix()}")


if __name__ == "__main__":
    main()
