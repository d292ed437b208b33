"""Draw the pictures of the tutorial, in English and in Chinese, as SVG files.

    python docs/learn/pictures.py

Each picture has its own light background, so it can be read on light and on dark pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
FOLDERS = {"en": DOCS / "learn/pictures", "zh": DOCS / "zh/learn/pictures"}
INK, GREY, PAPER = "#1f2933", "#7b8794", "#fbfaf7"
COLOURS = ["#2f6db3", "#c2571a", "#2f7d4f", "#7a4fa3"]  # of ranks 0 to 3
TINTS = ["#dbe8f6", "#f9e2d2", "#d9eedf", "#e8def3"]

CHINESE = {
    "batch": "batch",
    "model": "模型",
    "loss": "loss",
    "gradient": "梯度",
    "weights": "权重",
    "50 samples": "50 个样本",
    "forward": "前向",
    "one number: the mean": "一个数: 均值",
    "backward": "反向",
    "optimizer.step()": "optimizer.step()",
    "the next step uses the new weights": "下一步使用新的权重",
}


class Picture:
    """One SVG file; positions and sizes are in pixels, y points down."""

    def __init__(self, language: str, width: int, height: int) -> None:
        self.language = language
        self.width, self.height = width, height
        self.parts: list[str] = []

    def words(self, text: str) -> str:
        """This text in the language of the picture; numbers and names stay as they are."""
        return CHINESE[text] if self.language == "zh" else text

    def box(self, x: float, y: float, width: float, height: float, colour: str, fill: str) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 14,
        colour: str = INK,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        """One line of text around (x, y); `text` is translated if the table has it."""
        shown = self.words(text) if any(c.isalpha() for c in text) else text
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y + size * 0.36:g}" font-size="{size}" fill="{colour}" '
            f'text-anchor="{anchor}"{weight}>{escape(shown)}</text>'
        )

    def arrow(self, points: list[tuple[float, float]], colour: str = INK, dash: str = "") -> None:
        """A line through these points with a head at its end."""
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<path d="M {path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashed}/>'
        )
        (x0, y0), (x1, y1) = points[-2:]
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        corners = [(x1, y1)] + [
            (x1 - 9 * dx + side * 4.5 * dy, y1 - 9 * dy - side * 4.5 * dx) for side in (1, -1)
        ]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self.parts.append(f'<polygon points="{text}" fill="{colour}"/>')

    def svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}"'
        fonts = "Helvetica, Arial, 'Noto Sans CJK SC', 'Microsoft YaHei', sans-serif"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {self.width} {self.height}" font-family="{fonts}">'
        )
        paper = f'<rect {size} rx="10" fill="{PAPER}"/>'
        return "\n".join([head, paper, *self.parts, "</svg>", ""])


def step(language: str) -> Picture:
    """A training step of one process."""
    picture = Picture(language, 720, 190)
    names = ["batch", "model", "loss", "gradient", "weights"]
    notes = ["50 samples", "forward", "one number: the mean", "backward", "optimizer.step()"]
    for i, (name, note) in enumerate(zip(names, notes, strict=True)):
        x = 24 + 140 * i
        picture.box(x, 50, 104, 50, COLOURS[0], TINTS[0])
        picture.text(x + 52, 75, name, size=16, bold=True)
        picture.text(x + 52, 28, note, size=12, colour=GREY)
        if i:
            picture.arrow([(x - 36, 75), (x, 75)])
    picture.arrow([(636, 100), (636, 145), (216, 145), (216, 100)], GREY, "5 4")
    picture.text(426, 164, "the next step uses the new weights", size=12, colour=GREY)
    return picture


PICTURES: dict[str, Callable[[str], Picture]] = {"step": step}


def files() -> dict[Path, str]:
    """The path and the text of every picture, in both languages."""
    return {
        folder / f"{name}.svg": draw(language).svg()
        for language, folder in FOLDERS.items()
        for name, draw in PICTURES.items()
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(DOCS), file=sys.stderr)
