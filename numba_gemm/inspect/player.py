"""Player of a thread's steps: a self-contained HTML page, for notebooks, websites and browsers.

`Stepping.player` makes one. The page (player.html) has the record as JSON and needs no network.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime.launch import Simulated
from .following import Index
from .frames import record

__all__ = ["Player", "play"]

PAGE = Path(__file__).with_name("player.html")
TITLE, RECORD = "{{ title }}", "{{ record }}"
HEIGHT = 860  # of the frame in pixels, until the page sets its own
CONTEXT = 3  # lines around the current one in the text


class Player:
    """Steps of one or more threads of a block, to be moved through in a browser.

    A notebook shows the player as the value of a cell. As text, it is the last recorded step of the first thread.

    Attributes
    ----------
    record : dict
        The steps as plain data, as the page contains them in JSON. Each entry of ``record["threads"]`` has its
        recorded ``frames`` and the ``total`` number of steps.
    """

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record

    @property
    def title(self) -> str:
        """Kernel, block and threads."""
        threads = [str(tuple(one["thread"])) for one in self.record["threads"]]
        noun = "thread" if len(threads) == 1 else "threads"
        return f"{self.record['kernel']}, block {tuple(self.record['index'])}, {noun} {', '.join(threads)}"

    def html(self) -> str:
        """Return the page."""
        data = json.dumps(self.record, separators=(",", ":"), allow_nan=False)
        data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        return PAGE.read_text(encoding="utf-8").replace(TITLE, html.escape(self.title)).replace(RECORD, data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file."""
        Path(path).write_text(self.html(), encoding="utf-8")

    def _repr_html_(self) -> str:
        page = self.html().replace("&", "&amp;").replace("'", "&#39;")
        title = html.escape(f"Player of {self.title}", quote=True)
        note = f"{html.escape(self.title)}. If no player appears above, run the cell or trust the notebook."
        return (
            f'<iframe srcdoc=\'{page}\' title="{title}" loading="lazy" '
            f'style="width:100%;height:{HEIGHT}px;border:0"></iframe><p><small>{note}</small></p>'
        )

    def __str__(self) -> str:
        counts = [(len(one["frames"]), one["total"]) for one in self.record["threads"]]
        recorded = ", ".join(f"{kept}" if kept == total else f"{kept} of {total}" for kept, total in counts)
        frames = self.record["threads"][0]["frames"]
        last = frames[-1]
        changes = [frame.get("v", {}) for frame in frames if frame["c"] == last["c"]]
        values = {name: text for change in changes for name, text in change.items()}
        lines = [f"{self.title}: {recorded} steps; the last:", *self._source(last)]
        return "\n".join([*lines, *(f"    {name} = {text}" for name, text in values.items())])

    __repr__ = __str__

    def _source(self, frame: dict[str, Any]) -> list[str]:
        function = self.record["functions"][frame["f"]]
        first, lines = function["first"], function["lines"]
        at = frame["l"] - first
        near = range(max(at - CONTEXT, 0), min(at + CONTEXT + 1, len(lines)))
        return [f"{'->' if i == at else '  '} {first + i:>4}  {lines[i]}".rstrip() for i in near]


def play(made: Simulated, block: Index, threads: Sequence[Index], *, into: Any, seed: int | None, limit: int) -> Player:
    """Run a block of a launch and return the player of some of its threads; see `Stepping.player`."""
    return Player(record(made, block, threads, into=into, seed=seed, limit=limit))
