"""Print figures about the shape and the words of the code.

    python benchmarks/house.py [ROOT]     `make house`; ROOT is another checkout, to compare with

Needs nothing but the standard library, so that it runs on any checkout.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

LINE_LENGTH = 100
MARKS = {"who", "whoever", "whom", "nobody", "somebody", "told", "lest"}
WORD = re.compile(r"[A-Za-z][A-Za-z'’]*")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Function:
    name: str
    lines: int
    complexity: int


@dataclass
class Figures:
    """What is counted over the Python files of one folder."""

    files: dict[str, int] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)
    long_lines: int = 0
    words: int = 0
    marks: int = 0


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    source = root / "src" / "genba"
    figures = {"src": code_figures(source), "tests": code_figures(root / "tests")}
    for name, measured in figures.items():
        show_code(name, measured)
    show_marks("docs", *docs_words(root))
    show_glossary(source, root / "docs" / "explanation" / "glossary.md")
    show_cycles(source)


# What is counted


def code_figures(folder: Path) -> Figures:
    figures = Figures()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(folder))
        lines = text.splitlines()
        figures.files[name] = len(lines)
        figures.long_lines += sum(len(line) > LINE_LENGTH for line in lines)
        tree = ast.parse(text)
        figures.functions += [
            Function(f"{name}:{node.name}", length(node), complexity(node))
            for node in ast.walk(tree)
            if isinstance(node, FUNCTIONS)
        ]
        count_words(figures, [*comments(text), *docstrings(tree)])
    for path in sorted(folder.rglob("*.sql")):
        count_words(figures, re.findall(r"--(.*)", path.read_text(encoding="utf-8")))
    return figures


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function, without its decorators."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def complexity(function: ast.AST) -> int:
    """One more than the branches of a function; nested functions count by themselves.

    Branches are if, loops, except, case, conditional expressions, the operands of `and` and `or`
    after the first, and each `for` and `if` of a comprehension.
    """
    return 1 + sum(branches(node) for node in own_nodes(function))


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    pending = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        if not isinstance(node, FUNCTIONS):
            yield node
            pending.extend(ast.iter_child_nodes(node))


def branches(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    counted = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler)
    return int(isinstance(node, (*counted, ast.match_case)))


def comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            yield ast.get_docstring(node, clean=False) or ""


def count_words(figures: Figures, texts: Iterable[str]) -> None:
    for text in texts:
        words = [word.lower() for word in WORD.findall(text)]
        figures.words += len(words)
        figures.marks += sum(word in MARKS for word in words)


def docs_words(root: Path) -> tuple[int, int]:
    figures = Figures()
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    count_words(figures, (page.read_text(encoding="utf-8") for page in pages))
    return figures.words, figures.marks


# The graph of imports


def imports(source: Path, *, types: bool) -> dict[str, set[str]]:
    """Which module of the package imports which; with `types`, also for annotations only."""
    modules = {module_name(source, path): path for path in source.rglob("*.py")}
    graph = {}
    for name, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        imported = {
            target
            for node in import_nodes(tree, types)
            for target in targets(node, package, modules)
        }
        graph[name] = imported - {name}
    return graph


def module_name(source: Path, path: Path) -> str:
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_nodes(tree: ast.AST, types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not types:
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))


def targets(
    node: ast.Import | ast.ImportFrom, package: str, modules: Iterable[str]
) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
        return
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, base] if base else above)
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        if inner in modules:
            yield inner
        elif base in modules:
            yield base


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that reach each other; the graph is small enough to walk it from each."""
    reached = {name: reachable(graph, name) for name in graph}
    found = {
        frozenset({name} | {other for other in reached[name] if name in reached[other]})
        for name in graph
    }
    return sorted((set(group) for group in found if len(group) > 1), key=len, reverse=True)


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    pending = [start]
    while pending:
        new = graph[pending.pop()] - seen
        seen |= new
        pending.extend(new)
    return seen


# What is printed


def show_code(name: str, figures: Figures) -> None:
    longest_file = max(figures.files, key=lambda path: figures.files[path])
    longest = max(figures.functions, key=lambda function: function.lines)
    lengths = [function.lines for function in figures.functions]
    densest = sorted(figures.functions, key=lambda function: -function.complexity)
    over = {bound: sum(function.complexity > bound for function in densest) for bound in (12, 15)}
    print(f"{name}:")
    show("files", len(figures.files))
    show("lines", sum(figures.files.values()))
    show("lines of the median file", median(figures.files.values()))
    show("lines of the longest file", f"{figures.files[longest_file]}  {longest_file}")
    show("files over 500 lines", sum(lines > 500 for lines in figures.files.values()))
    show("functions", len(lengths))
    show("lines of the median function", median(lengths))
    show("lines of the longest function", f"{longest.lines}  {longest.name}")
    show("functions over complexity 12", over[12])
    show("functions over complexity 15", over[15])
    for function in densest[:5]:
        if function.complexity > 12:
            show("", f"{function.complexity:2}  {function.name}")
    show(f"lines over {LINE_LENGTH} columns", figures.long_lines)
    show_words(figures.words, figures.marks)


def show_marks(name: str, words: int, marks: int) -> None:
    print(f"{name}:")
    show_words(words, marks)


def show_words(words: int, marks: int) -> None:
    rate = 1000 * marks / max(words, 1)
    show("who, told … per 1,000 words", f"{rate:.2f}  ({marks} of {words})")


def show_glossary(source: Path, glossary: Path) -> None:
    """The stems of modules that the glossary has, `_` as it is or as a space."""
    text = glossary.read_text(encoding="utf-8").lower() if glossary.exists() else ""
    stems = {path.stem for path in source.rglob("*.py") if not path.stem.startswith("_")}
    missing = sorted(stem for stem in stems if not in_glossary(stem, text))
    print("glossary:")
    share = 100 * (1 - len(missing) / len(stems))
    show("module names explained", f"{share:.0f} %  ({len(stems) - len(missing)} of {len(stems)})")
    if text and missing:
        show("", "missing: " + ", ".join(missing))


def in_glossary(stem: str, text: str) -> bool:
    """Whether a page in lower case has the name of a module as a word."""
    names = {stem, stem.replace("_", " ")}
    return any(re.search(rf"(?<![a-z0-9_]){re.escape(name)}(?![a-z0-9_])", text) for name in names)


def show_cycles(source: Path) -> None:
    at_run_time = cycles(imports(source, types=False))
    with_types = cycles(imports(source, types=True))
    print("imports:")
    show("modules in cycles at run time", sum(map(len, at_run_time)))
    show("modules in cycles, type-only imports counted", sum(map(len, with_types)))
    for cycle in with_types:
        names = [name.removeprefix("genba.") for name in sorted(cycle)]
        show("", f"{len(cycle)}: " + ", ".join(names))


def show(label: str, value: object) -> None:
    print(f"  {label:<44} {value}")


if __name__ == "__main__":
    main()
