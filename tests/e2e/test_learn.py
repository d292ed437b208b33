"""The tutorial: its code runs, prints what the pages show, and both languages have the same code.

What the test knows about a page:

- A python block is a program. Its first line names its file: `# one.py`.
- A bash block runs in one folder with the programs of this chapter and of those before it. It must end
  with 0, unless its last line says `# exit code 1`.
- A text block is the output of the bash block before it, or of the blocks of all nodes. `...` stands for
  lines that are left out.
- Blocks that begin with `# node 0` and `# node 1` are for two machines. They run at the same time, and every
  node is this machine.
- A diff block is a change of tests/e2e/mutations.py.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from types import ModuleType

import pytest
from launching import environment, unused_port
from mutations import MUTATIONS, apply, read_program

ROOT = Path(__file__).resolve().parents[2]
ENGLISH = ROOT / "docs/learn"
CHINESE = ROOT / "docs/zh/learn"
CHAPTERS = sorted(ENGLISH.glob("[0-9]-*.md"))
QUICK = {"1-one-process"}  # in `make test`; the other chapters are slow
TOLERANCE = {
    "abs": 0.03,
    "rel": 0.05,
}  # rounding differs between processors, and training amplifies it


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```(.*)\n((?:.*\n)*?)```$", text, re.M)
    assert text.count("```") == 2 * len(found), f"{page.name}: a fence that the test does not read"
    return [Block(language, content) for language, content in found]


def programs_of(page: Path) -> dict[str, str]:
    """The text of each program by the name of its file."""
    found = {}
    for block in blocks_of(page):
        if block.language == "python":
            name = re.fullmatch(r"# (\w+\.py)", block.lines[0])
            assert name, f"{page.name}: a program without a name: {block.lines[0]}"
            found[name[1]] = block.text
    return found


VARYING = (  # what differs between machines and runs
    (r"^paceline: \d+ ranks? on .*", "paceline: ranks"),  # threads, cores, ports
    (r"\bhost \S+?(,?)(?= |$)", r"host #\1"),
    (r"(?:/[\w.-]+)+/", ""),
    (r"\d{8}-\d{6}-\w+", "#"),  # the folder of a report
    (r"\bpids( \d+)+", "pids #"),
    (r"\b(pid |process |localhost:)\d+", r"\1#"),
    (r"\b\d+(\.\d+)? (s|ms|MiB|KiB|B)\b", r"# \2"),
    (r'"time_s": [\d.]+', '"time_s": #'),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "#"),
    (r"\d+(\.\d+)?e-\d+", "#"),  # rounding errors
    (r"resumed after step \d+ \(epoch \d+\)", "resumed after step #"),
    (r"weights [0-9a-f]{16}", "weights #"),  # `digests` compares them
)


def comparable(line: str) -> tuple[str, list[float]]:
    """The line without what differs between machines and runs, and its decimal fractions."""
    line = line.rstrip()
    for pattern, replacement in VARYING:
        line = re.sub(pattern, replacement, line)
    fractions = re.findall(r"-?\d+\.\d+", line)
    return re.sub(r"-?\d+\.\d+", "#", line), [float(number) for number in fractions]


def digests(text: str) -> list[str]:
    return re.findall(r"weights ([0-9a-f]{16})", text)


def assert_shows(shown: list[str], output: str) -> None:
    """Every shown line is a line of the output, in any order, because ranks print at the same time."""
    left = [comparable(line) for line in output.splitlines()]
    for line in shown:
        if line == "...":
            continue
        words, fractions = comparable(line)
        same = [other for other in left if other[0] == words]
        near = [other for other in same if other[1] == pytest.approx(fractions, **TOLERANCE)]
        assert near, f"not printed: {line}\nprinted:\n{output}"
        left.remove(near[0])
    assert "..." in shown or not left, f"printed, but not on the page: {left}"


def shell(command: str, folder: Path) -> subprocess.Popen[str]:
    """Start these lines in the folder, with `python` and `paceline` of this environment."""
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=environment(PATH=here),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_together(blocks: list[Block], folder: Path) -> list[str]:
    """The outputs of blocks that run at the same time; one block, or one for each node."""
    port = str(unused_port())
    commands = [re.sub(r"\bhost=node0\b", f"host=localhost:{port}", b.text) for b in blocks]
    started = [shell(command, folder) for command in commands]
    outputs = [process.communicate(timeout=110)[0] for process in started]
    for block, process, output in zip(blocks, started, outputs, strict=True):
        expected = re.search(r"# exit code (\d+)$", block.lines[-1])
        assert process.returncode == int(expected[1] if expected else 0), output
    return outputs


@pytest.mark.timeout(900)  # the chapter of the mistakes makes 30 runs
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=() if page.stem in QUICK else pytest.mark.slow)
        for page in CHAPTERS
    ],
)
@pytest.mark.ci
def test_the_code_of_a_chapter_runs(page: Path, tmp_path: Path) -> None:
    for chapter in CHAPTERS[: CHAPTERS.index(page) + 1]:
        for name, text in programs_of(chapter).items():
            (tmp_path / name).write_text(text)
    for folder in ("verify_programs", "e2e"):
        shutil.copytree(ROOT / "tests" / folder, tmp_path / "tests" / folder)
    blocks, shown_digests, printed_digests = blocks_of(page), [], []
    while blocks:
        together = [blocks.pop(0)]
        if together[0].language != "bash":
            continue
        while blocks and together[0].text.startswith("# node ") and blocks[0].language == "bash":
            together.append(blocks.pop(0))
        outputs = run_together(together, tmp_path)
        if blocks and blocks[0].language == "text":
            assert_shows(blocks[0].lines, "".join(outputs))
            shown_digests += digests(blocks[0].text)
            printed_digests += digests("".join(outputs))
    pairs = set(zip(shown_digests, printed_digests, strict=True))
    assert len(pairs) == len(set(shown_digests)) == len(set(printed_digests)), pairs


def test_every_program_is_run_by_a_chapter() -> None:
    for i, page in enumerate(CHAPTERS):
        commands = "".join(
            block.text
            for later in CHAPTERS[i:]
            for block in blocks_of(later)
            if block.language == "bash"
        )
        assert {name for name in programs_of(page) if name not in commands} == set()


def test_blocks_are_of_kinds_that_a_test_checks() -> None:
    changes = "".join(
        "".join(unified_diff(*(text.splitlines(keepends=True) for text in texts)))
        for base, mutations in MUTATIONS.items()
        for texts in [(read_program(base), apply(base, mutation)) for mutation in mutations]
    )
    for page in CHAPTERS:
        before = ""
        for block in blocks_of(page):
            assert block.language in ("python", "bash", "text", "diff"), (page, block)
            if block.language == "text":
                assert before == "bash", f"{page.name}: an output without its command"
            if block.language == "diff":
                assert block.text in changes, (page, block)
            before = block.language


def _same_in_both() -> list[tuple[Path, Path]]:
    readmes = ROOT / "README.md", ROOT / "README.zh-CN.md"
    return [readmes, *((page, CHINESE / page.name) for page in sorted(ENGLISH.glob("*.md")))]


@pytest.mark.parametrize("pages", _same_in_both(), ids=lambda pages: pages[0].stem)
def test_chinese_and_english_have_the_same_headings_code_and_pictures(
    pages: tuple[Path, Path],
) -> None:
    english, chinese = pages
    assert blocks_of(chinese) == blocks_of(english)
    texts = [
        re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for page in pages
    ]
    for pattern in (r"^(#+) ", r"!\[[^\]]*\]\(([^)]+)\)", r"^(\|)"):
        assert re.findall(pattern, texts[1], re.M) == re.findall(pattern, texts[0], re.M), pattern
    assert re.search(r"[一-鿿]", texts[1])
    assert f"]({os.path.relpath(chinese, english.parent)})" in texts[0], "no link to Chinese"
    assert f"]({os.path.relpath(english, chinese.parent)})" in texts[1], "no link to English"


def test_no_chinese_page_is_without_an_english_one() -> None:
    assert {p.name for p in CHINESE.glob("*.md")} == {p.name for p in ENGLISH.glob("*.md")}


def _pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ENGLISH / "pictures.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_draws_the_pictures_of_the_pages() -> None:
    files = _pictures().files()
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, path
    drawn = {
        folder: {p for p in files if p.is_relative_to(folder)} for folder in (ENGLISH, CHINESE)
    }
    for folder, paths in drawn.items():
        assert set(folder.rglob("*.svg")) == paths
        pages = "".join(page.read_text(encoding="utf-8") for page in folder.glob("*.md"))
        assert {path.name for path in paths if f"](pictures/{path.name})" not in pages} == set()
