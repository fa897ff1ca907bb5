"""What a plugin's source imports of fastgen, read from its syntax tree: it may be `fastgen.api` and nothing else."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import fastgen
from fastgen import api
from fastgen.errors import did_you_mean

__all__ = ["offences"]

API = "fastgen.api"
TESTING = "fastgen.testing"


def offences(source: bytes, *, is_test: bool = False) -> list[tuple[int, str]]:
    """What a file uses of fastgen beyond its public names, as ``(line, what)``.

    Seen are import statements at any depth, imports by name with a literal (``import_module("fastgen.core...")`` and
    whatever else is given such a string, as a spec's lazy ``"module:attribute"``), what is reached through the name
    ``fastgen``, and names that `fastgen.api` does not have. A test may also use `fastgen.testing`, and `fastgen` as
    its users do.

    Raises:
        SyntaxError: it is not Python.
    """
    tree = ast.parse(source)
    reader = _Reader(is_test)
    reader.visit(tree)
    return sorted(set(reader.found))


@cache
def _modules() -> frozenset[str]:
    """The modules directly in the package fastgen."""
    folder = Path(fastgen.__file__).parent
    return frozenset(path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file())


class _Reader(ast.NodeVisitor):
    def __init__(self, is_test: bool) -> None:
        self.is_test = is_test
        self.found: list[tuple[int, str]] = []
        self.api_names: set[str] = set()
        """What the file calls `fastgen.api`."""

    # ---- statements

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._module(node, alias.name)
            if alias.name == API and alias.asname:
                self.api_names.add(alias.asname)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module or node.module.split(".")[0] != "fastgen":
            return
        for alias in node.names:
            if node.module == "fastgen":
                if alias.name == "api":
                    self.api_names.add(alias.asname or "api")
                elif alias.name in _modules():
                    self._module(node, f"fastgen.{alias.name}")
                else:
                    self._public(node, alias.name)
            elif node.module == API:
                self._api(node, alias.name)
            else:
                self._module(node, node.module)

    # ---- expressions

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            if node.value.id == "fastgen" and node.attr in _modules():
                self._module(node, f"fastgen.{node.attr}")
            elif node.value.id == "fastgen":
                self._public(node, node.attr)
            elif node.value.id in self.api_names:
                self._api(node, node.attr)
        elif _dotted(node.value) == API:
            self._api(node, node.attr)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # docstrings may speak of anything
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.startswith("fastgen."):
            module = node.value.partition(":")[0]
            parts = module.split(".")
            if all(part.isidentifier() for part in parts) and parts[1] in _modules():
                self._module(node, module)

    # ---- rules

    def _module(self, node: ast.stmt | ast.expr, module: str) -> None:
        if module.split(".")[0] != "fastgen" or module == API:
            return
        if module == "fastgen":
            if not self.is_test:
                self.found.append((node.lineno, "imports fastgen"))
            return
        if not (self.is_test and (module == TESTING or module.startswith(f"{TESTING}."))):
            self.found.append((node.lineno, f"imports {module}"))

    def _public(self, node: ast.stmt | ast.expr, name: str) -> None:
        if not self.is_test and not name.startswith("__"):
            self.found.append((node.lineno, f"uses fastgen.{name}"))

    def _api(self, node: ast.stmt | ast.expr, name: str) -> None:
        if name != "*" and name not in api.__all__:
            near = did_you_mean(name, api.__all__)
            self.found.append((node.lineno, f"uses fastgen.api.{name}, which is not there.{near}".rstrip(".")))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""
