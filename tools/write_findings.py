"""Write docs/findings.md: one entry for every code in the packages' sources, with message, cause and remedy.

Messages and remedies are taken from where a code is raised; ``{...}`` stands for what is filled in there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "findings.md"
CODE = re.compile(r"VIME-[A-Z]+-\d{3}")
SEVERITIES = ("error", "warning", "info")
AREAS = {
    "ALIGN": "Two sides that must agree",
    "BACKEND": "Trainer and engine",
    "CLI": "The command line",
    "CONFIG": "Configuration",
    "DATA": "Datasets, prompts and rewards",
    "ENV": "Environment and policies",
    "PLUGIN": "Plugins",
    "RECORD": "Run records",
}
HEAD = """# Findings and errors

Every error and finding of vime has a stable code, says what is wrong with which value, and what to do. With `--json` it
is `{"error": {"code", "message", "help"}}`; `vime doctor` lists findings of the same form. Exit codes: 1 something that
was promised does not hold, 2 usage, configuration or environment, 3 a backend failed or nothing could be checked.

Below, `{...}` stands for what is filled in. Written by `tools/write_findings.py`.
"""


@dataclass(frozen=True)
class Place:
    """A code where it is raised. ``about`` is the first sentence of what encloses it."""

    code: str
    module: str
    message: str
    remedy: str
    about: str


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


def page() -> str:
    """The whole page."""
    by_code: dict[str, list[Place]] = {}
    for place in places():
        by_code.setdefault(place.code, []).append(place)
    parts = [HEAD]
    for area, title in AREAS.items():
        parts.append(f"## {title}\n")
        parts += [_entry(code, found) for code, found in sorted(by_code.items()) if code.split("-")[1] == area]
    return "\n".join(parts)


def places() -> Iterator[Place]:
    """Every place in the packages that names a code."""
    for file in sorted(ROOT.glob("packages/*/src/**/*.py")):
        if file.name != "errors.py":
            yield from _places(file)


def _places(file: Path) -> Iterator[Place]:
    tree = ast.parse(file.read_text())
    module = ".".join(file.with_suffix("").parts[file.parts.index("src") + 1 :]).removesuffix(".__init__")
    enclosing: list[tuple[ast.AST, str]] = [(tree, ast.get_docstring(tree) or "")]
    holders = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    enclosing += [(node, ast.get_docstring(node) or "") for node in holders]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value):
            yield _place(node, tree, module, enclosing)


def _place(code: ast.Constant, tree: ast.AST, module: str, enclosing: list[tuple[ast.AST, str]]) -> Place:
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _holds(n, code)]
    call = max(inside, key=lambda n: n.lineno, default=None)
    message, remedy = _texts(call) if call else ("", "")
    holders = [(holder, text) for holder, text in enclosing if _holds(holder, code)]
    about = [text for _, text in holders if text]
    message = message or "; or: ".join(_callers_texts(holders[-1][0], tree))
    return Place(str(code.value), module, message, remedy, about[-1].split("\n\n")[0].replace("\n", " "))


def _callers_texts(holder: ast.AST, tree: ast.AST) -> list[str]:
    """Messages handed to the function or class that holds a code, where it makes no message of its own."""
    if not isinstance(holder, ast.FunctionDef | ast.ClassDef):
        return []
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    named = [_texts(n)[0] for n in calls if isinstance(n.func, ast.Name) and n.func.id == holder.name]
    return [text.strip() for text in dict.fromkeys(named) if text]


def _texts(call: ast.Call) -> tuple[str, str]:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    strings = [_text(argument) for argument in call.args if isinstance(argument, ast.JoinedStr | ast.Constant)]
    strings = [text for text in strings if text and not CODE.fullmatch(text) and text not in SEVERITIES]
    remedy = _text(keywords["remedy"]) if "remedy" in keywords else (strings[2] if len(strings) > 2 else "")
    return (strings[0] if strings else ""), remedy


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_filled(part) if isinstance(part, ast.FormattedValue) else _text(part) for part in node.values)
    return ""


def _filled(part: ast.FormattedValue) -> str:
    name = part.value
    return f"{{{ast.unparse(name)}}}" if isinstance(name, ast.Name | ast.Attribute) else "{...}"


def _holds(node: ast.AST, inner: ast.AST) -> bool:
    return any(child is inner for child in ast.walk(node))


def _entry(code: str, found: list[Place]) -> str:
    lines = [f"### {code}", ""]
    for place in found:
        lines.append(f"- **{(place.message or place.about).strip()}**")
        lines += [f"  - help: {place.remedy.strip()}"] if place.remedy else []
        lines += [f"  - `{place.module}`: {place.about}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
