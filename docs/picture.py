"""Draw docs/demo.svg, top.svg and look.svg: `genba demo` as a terminal shows it, a few seconds
after its start, and
what `genba top`, `job ls` and `doctor` show at that moment.

    python docs/picture.py
"""

from __future__ import annotations

import io
import os
import re
import sys
from importlib import import_module
from pathlib import Path

import pexpect
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group, RenderableType
from rich.text import Text

from genba.cli.screen import Screen, draw

demo = import_module("genba.cli.demo")  # by name: the package has a command `demo` too

WANTED = {
    "running",
    "succeeded",
    "failed",
    "timed_out",
    "held",
    "blocked",
}  # when all of these can be seen
WIDTH = 136  # columns
TOP = (100, 24)  # columns, lines


def main() -> None:
    with demo.running_demo() as stage:
        for _ in stage.looks():
            if {row.state for row in stage.rows} >= WANTED:
                break
        _save("demo", "make demo", demo._picture(stage, WIDTH), WIDTH)
        seen = stage.app.overview(20)
        _save(
            "top",
            "genba top",
            Group(*draw(Screen(), seen, "sqlite:///genba.db demo", *TOP)),
            TOP[0],
        )
        said = [
            _said(stage.app.url, *words) for words in (("job", "ls", "--state", "any"), ("doctor",))
        ]
        _save("look", "genba job ls, genba doctor", Group(*said), TOP[0])


def _said(url: str, *words: str) -> Text:
    """What a command prints on a terminal, with its line."""
    env = {**os.environ, "GENBA_URL": url, "GENBA_NAMESPACE": "demo", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "genba.cli", *words]
    text = pexpect.run(
        " ".join(command), env=env, dimensions=(40, TOP[0]), encoding="utf-8", timeout=30
    )
    return Text.from_ansi(f"$ genba {' '.join(words)}\n{text}".replace("\r", ""))


def _save(name: str, title: str, picture: RenderableType, width: int) -> None:
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(picture)
    drawn = console.export_svg(
        title=title, code_format=_plain(CONSOLE_SVG_FORMAT), unique_id=f"genba-{name}"
    )
    path = Path(__file__).with_name(f"{name}.svg")
    path.write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n")


def _plain(template: str) -> str:
    """Without fonts from elsewhere: a picture in a README may not load any."""
    bare = re.sub(r"@font-face\s*\{\{.*?\}\}", "", template, flags=re.DOTALL)
    return bare.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


if __name__ == "__main__":
    main()
