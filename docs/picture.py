"""Draw docs/demo.svg: `genba demo` as a terminal shows it, a few seconds after its start.

    python docs/picture.py
"""

from __future__ import annotations

import io
import re
from importlib import import_module
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

demo = import_module("genba.cli.demo")  # by name: the package has a command `demo` too

WANTED = {"running", "succeeded", "failed", "timed_out", "held", "blocked"}  # when all of these can be seen
WIDTH = 136  # columns


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    with demo._stage() as stage:
        for _ in stage.looks():
            if {row.state for row in stage.rows} >= WANTED:
                break
        console.print(demo._picture(stage, WIDTH))
    picture = console.export_svg(title="make demo", code_format=_plain(CONSOLE_SVG_FORMAT), unique_id="genba")
    Path(__file__).with_name("demo.svg").write_text("\n".join(line.rstrip() for line in picture.splitlines()) + "\n")


def _plain(template: str) -> str:
    """Without fonts from elsewhere: a picture in a README may not load any."""
    bare = re.sub(r"@font-face\s*\{\{.*?\}\}", "", template, flags=re.DOTALL)
    return bare.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


if __name__ == "__main__":
    main()
