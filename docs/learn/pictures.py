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

CHINESE = {  # names of code and terms such as "rank 0" are the same in both languages
    "model": "模型",
    "gradient": "梯度",
    "weights": "权重",
    "50 samples": "50 个样本",
    "forward": "前向",
    "one number: the mean": "一个数: 均值",
    "backward": "反向",
    "the next step uses the new weights": "下一步使用新的权重",
    "ranks.py, a process": "ranks.py, 一个进程",
    "its own memory": "自己的内存",
    "process group: messages between the ranks": "进程组: rank 之间的通信",
    "before": "之前",
    "sum": "求和",
    "after": "之后",
    "rank 0 has 3 samples, rank 1 has 5": "rank 0 有 3 个样本, rank 1 有 5 个",
    "weight of each sample in the mean of the two means": "两个均值再取均值时, 每个样本的权重",
    "25 samples": "25 个样本",
    "mean of the": "所有 rank 的",
    "gradients": "梯度均值",
    "equal weights": "权重相同",
    "time": "时间",
    "one epoch in the order of the shuffle": "一个 epoch, 打乱后的顺序",
    "repeated": "重复",
    "the 50 samples of a step, in the order of the epoch": "一个 step 的 50 个样本, 按 epoch 的顺序",
    "1 process": "1 个进程",
    "2 processes": "2 个进程",
    "3 processes": "3 个进程",
    "checkpoints": "检查点",
    "a rank is killed in step 90": "step 90: 一个 rank 被杀",
    "rank 0 saves step 90": "rank 0 保存 step 90",
    "resumed after step 90": "从 step 90 之后恢复",
    "first start": "第一次启动",
    "restart": "重启后",
    "launcher": "启动器",
    "rendezvous: who is there, and who has which rank": "rendezvous: 谁在, 谁是哪个 rank",
    "gradients: collectives between all ranks": "梯度: 所有 rank 之间的集合通信",
    "shared folder: data, checkpoints": "共享目录: 数据, 检查点",
    "weight of each sample in sum / count": "总和 / 总数时, 每个样本的权重",
}


class Picture:
    """One SVG file; positions and sizes are in pixels, y points down."""

    def __init__(self, language: str, width: int, height: int) -> None:
        self.language = language
        self.width, self.height = width, height
        self.parts: list[str] = []

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
        shown = CHINESE.get(text, text) if self.language == "zh" else text
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


def ranks(language: str) -> Picture:
    """Three processes with memories of their own, and the group that connects them."""
    picture = Picture(language, 720, 220)
    for rank, value in enumerate((10, 30, 80)):
        x = 24 + 232 * rank
        picture.box(x, 20, 208, 124, COLOURS[rank], "#ffffff")
        picture.text(x + 104, 40, f"rank {rank}", size=16, colour=COLOURS[rank], bold=True)
        picture.text(x + 104, 62, "ranks.py, a process", size=12, colour=GREY)
        picture.box(x + 16, 76, 176, 54, COLOURS[rank], TINTS[rank])
        picture.text(x + 104, 90, "its own memory", size=12, colour=GREY)
        picture.text(x + 104, 113, f"{value}", size=16)
        picture.arrow([(x + 96, 144), (x + 96, 174)], COLOURS[rank])
        picture.arrow([(x + 112, 174), (x + 112, 144)], COLOURS[rank])
    picture.box(24, 174, 672, 30, GREY, "#eceff1")
    picture.text(360, 189, "process group: messages between the ranks")
    return picture


def collectives(language: str) -> Picture:
    """What all_reduce and broadcast do with the values of three ranks."""
    picture = Picture(language, 720, 224)
    values = [10, 30, 80]
    for left, name, result in ((24, "all_reduce", 120), (384, "broadcast", 10)):
        picture.text(left + 156, 24, name, size=16, bold=True)
        picture.text(left + 92, 52, "before", size=12, colour=GREY)
        picture.text(left + 260, 52, "after", size=12, colour=GREY)
        for rank, value in enumerate(values):
            y = 70 + 50 * rank
            picture.text(left + 26, y + 19, f"rank {rank}", size=13, colour=COLOURS[rank])
            picture.box(left + 62, y, 60, 38, COLOURS[rank], TINTS[rank])
            picture.text(left + 92, y + 19, str(value), size=16)
            picture.box(left + 230, y, 60, 38, COLOURS[rank], TINTS[rank])
            picture.text(left + 260, y + 19, str(result), size=16, bold=True)
            if name == "broadcast":
                picture.arrow([(left + 122, 89), (left + 230, y + 19)], COLOURS[0])
            else:
                picture.arrow([(left + 122, y + 19), (left + 154, 139 + 12 * (rank - 1))], INK)
                picture.arrow([(left + 198, 139 + 12 * (rank - 1)), (left + 230, y + 19)], INK)
        if name == "all_reduce":
            picture.box(left + 154, 112, 44, 54, GREY, "#ffffff")
            picture.text(left + 176, 139, "sum", size=13)
    return picture


def weights(language: str) -> Picture:
    """The weight of each sample in the mean of two means, and in the sum over the count."""
    picture = Picture(language, 720, 236)
    picture.text(360, 24, "rank 0 has 3 samples, rank 1 has 5", size=15, bold=True)
    rows = (
        ("weight of each sample in the mean of the two means", ["1/6"] * 3 + ["1/10"] * 5),
        ("weight of each sample in sum / count", ["1/8"] * 8),
    )
    for row, (title, shares) in enumerate(rows):
        y = 56 + 92 * row
        picture.text(64, y, title, size=13, colour=GREY, anchor="start")
        for i, share in enumerate(shares):
            rank = int(i >= 3)
            x = 64 + 75 * i
            picture.box(x, y + 16, 67, 44, COLOURS[rank], TINTS[rank])
            picture.text(x + 33, y + 38, share, size=16)
    return picture


def ddp(language: str) -> Picture:
    """A step of DistributedDataParallel on two ranks."""
    picture = Picture(language, 720, 232)
    for rank in range(2):
        y = 30 + 88 * rank
        picture.text(44, y + 26, f"rank {rank}", size=15, colour=COLOURS[rank], bold=True)
        parts = ["25 samples", "forward", "backward"]
        for i, name in enumerate(parts):
            x = 88 + 110 * i
            picture.box(x, y, 92, 52, COLOURS[rank], TINTS[rank])
            picture.text(x + 46, y + 26, name)
            picture.arrow([(x + 92, y + 26), (x + 110, y + 26)], COLOURS[rank])
        picture.arrow([(528, y + 26), (546, y + 26)], COLOURS[rank])
        picture.box(546, y, 140, 52, COLOURS[rank], TINTS[rank])
        picture.text(616, y + 17, "optimizer.step()")
        picture.text(616, y + 38, "equal weights", size=12, colour=GREY)
    picture.box(418, 30, 110, 140, GREY, "#ffffff")
    picture.text(473, 72, "all_reduce", bold=True)
    picture.text(473, 104, "mean of the", size=13)
    picture.text(473, 124, "gradients", size=13)
    picture.arrow([(88, 196), (686, 196)], GREY)
    picture.text(387, 214, "time", size=12, colour=GREY)
    return picture


def sampler(language: str) -> Picture:
    """DistributedSampler deals ten samples to three ranks, and repeats two of them."""
    picture = Picture(language, 720, 246)
    order = [7, 2, 9, 0, 4, 1, 8, 5, 3, 6]
    dealt = order + order[:2]
    picture.text(88, 26, "one epoch in the order of the shuffle", colour=GREY, anchor="start")
    for i, sample in enumerate(dealt):
        rank = i % 3
        x, copied = 88 + 50 * i, i >= len(order)
        picture.box(x, 44, 42, 36, COLOURS[rank], TINTS[rank])
        picture.text(x + 21, 62, str(sample), size=16, bold=copied)
        x = 88 + 50 * (i // 3)
        picture.box(x, 108 + 44 * rank, 42, 36, COLOURS[rank], TINTS[rank])
        picture.text(x + 21, 126 + 44 * rank, str(sample), size=16, bold=copied)
    for rank in range(3):
        picture.text(44, 126 + 44 * rank, f"rank {rank}", size=15, colour=COLOURS[rank], bold=True)
    picture.text(634, 26, "repeated", size=13)
    picture.text(340, 192, "repeated", size=13)
    picture.arrow([(310, 182), (282, 170)], INK)
    picture.arrow([(310, 202), (282, 212)], INK)
    return picture


def batches(language: str) -> Picture:
    """The same 50 samples, divided over one, two and three ranks."""
    picture = Picture(language, 720, 216)
    title = "the 50 samples of a step, in the order of the epoch"
    picture.text(120, 26, title, colour=GREY, anchor="start")
    for row, size in enumerate((1, 2, 3)):
        y = 48 + 54 * row
        picture.text(106, y + 19, "1 process" if size == 1 else f"{size} processes", anchor="end")
        for rank in range(size):
            first, end = 50 * rank // size, 50 * (rank + 1) // size
            x, width = 120 + 11.2 * first, 11.2 * (end - first) - 4
            picture.box(x, y, width, 38, COLOURS[rank], TINTS[rank])
            picture.text(x + width / 2, y + 19, f"rank {rank}: {end - first}")
    return picture


def resume(language: str) -> Picture:
    """A rank is killed, another one saves the last step, and the job resumes after it."""
    picture = Picture(language, 720, 224)

    def at(step: int) -> float:
        return 130 + 2.7 * step

    picture.text(24, 78, "first start", anchor="start", colour=COLOURS[0])
    picture.text(24, 176, "restart", anchor="start", colour=COLOURS[2])
    picture.arrow([(at(0), 78), (at(90), 78)], COLOURS[0])
    picture.text(at(90) + 14, 68, "a rank is killed in step 90", anchor="start", colour=COLOURS[1])
    picture.text(at(90) + 14, 88, "rank 0 saves step 90", anchor="start", colour=COLOURS[0])
    picture.arrow([(at(90), 176), (at(208), 176)], COLOURS[2])
    for step in (20, 40, 60, 80, 90):
        picture.box(at(step) - 7, 71, 14, 14, COLOURS[0], TINTS[0])
        picture.text(at(step), 56, str(step), size=12, colour=GREY)
    for step in range(100, 201, 20):
        picture.box(at(step) - 7, 169, 14, 14, COLOURS[2], TINTS[2])
        picture.text(at(step), 154, str(step), size=12, colour=GREY)
    picture.arrow([(at(90), 85), (at(90), 168)], INK, "5 4")
    picture.text(at(90) + 14, 122, "resumed after step 90", size=13, anchor="start")
    picture.box(24, 18, 14, 14, COLOURS[0], TINTS[0])
    picture.text(46, 25, "checkpoints", size=13, colour=GREY, anchor="start")
    return picture


def nodes(language: str) -> Picture:
    """Two nodes with two ranks each."""
    picture = Picture(language, 720, 290)
    picture.box(130, 16, 460, 32, GREY, "#ffffff")
    picture.text(360, 32, "rendezvous: who is there, and who has which rank", size=13)
    for node in range(2):
        x = 24 + 352 * node
        picture.box(x, 74, 320, 122, GREY, "#ffffff")
        picture.text(x + 40, 94, f"node{node}", bold=True)
        picture.box(x + 110, 82, 100, 28, GREY, "#eceff1")
        picture.text(x + 160, 96, "launcher", size=13)
        picture.arrow([(x + 160, 82), (x + 160, 48)], GREY)
        for local in range(2):
            rank = 2 * node + local
            left = x + 20 + 150 * local
            picture.box(left, 134, 130, 44, COLOURS[rank], TINTS[rank])
            picture.text(left + 65, 156, f"rank {rank}", size=15, colour=COLOURS[rank], bold=True)
            picture.arrow([(x + 160, 110), (left + 65, 134)], GREY)
            picture.arrow([(left + 65, 178), (left + 65, 210)], COLOURS[rank])
    picture.box(24, 210, 672, 30, GREY, "#eceff1")
    picture.text(360, 225, "gradients: collectives between all ranks", size=13)
    picture.box(24, 248, 672, 30, GREY, "#ffffff")
    picture.text(360, 263, "shared folder: data, checkpoints", size=13)
    return picture


PICTURES: dict[str, Callable[[str], Picture]] = {
    "step": step,
    "ranks": ranks,
    "collectives": collectives,
    "weights": weights,
    "ddp": ddp,
    "batches": batches,
    "resume": resume,
    "nodes": nodes,
    "sampler": sampler,
}


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
