"""Draw hang.svg, the picture of the README: `paceline run` explains why a script makes no progress.

    python docs/assets/hang.py

The script below is run on two ranks in a terminal of 112 columns. Its output is drawn as it is, except that
the name of the host is replaced.
"""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from html import escape
from pathlib import Path

COLUMNS, SIZE, LINE = 112, 14, 20
WIDTH_OF_LETTER = 0.6 * SIZE
INK, PAPER, BRIGHT = "#d5dae2", "#1f2430", "#ffffff"
COMMAND = ["paceline", "run", "--nproc-per-node", "2", "--hang-after", "3", "train.py"]
SCRIPT = """\
import torch
import torch.distributed as dist

dist.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))


def read(step):
    if step == 50 and dist.get_rank() == 1:
        open("shard-1").read()  # a pipe that nobody writes to, as a file on a storage that is down
    return torch.ones(4, 8)


for step in range(1000):
    batch = read(step)
    model(batch).sum().backward()
"""


def report() -> str:
    """The output of the command up to the end of the report."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        os.mkfifo(Path(folder, "shard-1"))
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", *COMMAND], cwd=folder, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        with open(ours, encoding="utf-8", newline="") as terminal:
            lines: list[str] = []
            while not lines or not lines[-1].startswith("fix:"):
                lines.append(terminal.readline().rstrip())
            process.send_signal(signal.SIGINT)
            process.wait()
    return "\n".join(lines).replace(f"host {socket.gethostname()}", "host node0")


def draw(text: str) -> str:
    """This text as a terminal, in SVG."""
    lines = [("$ " + " ".join(COMMAND), BRIGHT)]
    for line in text.splitlines():
        lines += [(part, INK) for part in textwrap.wrap(line, COLUMNS, drop_whitespace=False)]
    width, height = COLUMNS * WIDTH_OF_LETTER + 32, len(lines) * LINE + 28
    rows = [
        f'<text x="16" y="{14 + LINE * (row + 0.75):g}" fill="{colour}" xml:space="preserve" '
        f'textLength="{len(line) * WIDTH_OF_LETTER:.1f}">{escape(line)}</text>'
        for row, (line, colour) in enumerate(lines)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" '
            f'width="{width:g}" height="{height}" font-family="Menlo, Consolas, '
            f'\'DejaVu Sans Mono\', monospace" font-size="{SIZE}">',
            f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>',
            *rows,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_name("hang.svg").write_text(draw(report()))
