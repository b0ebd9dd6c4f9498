"""What the benchmark runs: nothing, so that all the time is genba's own."""

from __future__ import annotations

from genba import Genba

TARGET = "genba.bench.tasks:app"

app = Genba()


@app.task(name="genba.bench.number")
def number(n: int) -> int:
    """Gives its number back, so that a result shows which job it came from."""
    return n
