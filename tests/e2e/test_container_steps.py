"""The steps of containers/Dockerfile and the commands of the Compose file, run without a container engine.

Each stage gets a root of its own: an overlay over the system of this machine, which takes the place of the
base image. What the steps write, such as /opt/venv and a user, exists in the overlay only.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "containers"
UID = "54321"
_MOUNT = """
set -e
root=$1; shift
mount -t overlay overlay -o "lowerdir=/,upperdir=$root/upper,workdir=$root/work" "$root/merged"
mount --rbind /proc "$root/merged/proc"; mount --rbind /dev "$root/merged/dev"
mount -t tmpfs tmp "$root/merged/tmp"
exec "$@"
"""


def _missing() -> str:
    """Why the steps cannot be run here; empty if they can."""
    if os.geteuid() != 0:
        return "only root can mount an overlay and run steps as another user"
    for tool in ("unshare", "mount", "chroot", "useradd"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    return ""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(_missing()), reason=_missing() or "-"),
]


class Stage:
    """One stage of the Dockerfile."""

    def __init__(self, folder: Path, arguments: dict[str, str]) -> None:
        self.folder = folder
        for name in ("upper", "work", "merged"):
            (folder / name).mkdir(parents=True)
        self.variables = {"PATH": os.environ["PATH"]}
        self.arguments = arguments
        self.place = "/"
        self.user = "0"
        # In an image, `python` is where each user may read it.
        parents = {str(path) for path in Path(sys.base_prefix).parents}
        self.call(["chmod", "a+rx", *sorted(parents)])
        self.call(["ln", "-sf", f"{sys.base_prefix}/bin/python3", "/usr/local/bin/python"])

    def copy(self, sources: Sequence[Path], target: str, ignored: Sequence[str] = ()) -> None:
        """Copy files and the contents of folders into the root."""
        to = self.folder / "upper" / str(Path(self.place, target)).lstrip("/")
        to.mkdir(parents=True, exist_ok=True)
        for source in sources:
            if source.is_dir():
                ignore = shutil.ignore_patterns(*ignored)
                shutil.copytree(source, to, symlinks=True, dirs_exist_ok=True, ignore=ignore)
            else:
                shutil.copy(source, to)

    def call(self, command: Sequence[str]) -> str:
        """Run a command in this root, as the user of the stage; its output."""
        # The place may not exist yet: the first command makes it.
        go = f'cd {self.place} 2> /dev/null; exec "$@"'
        inside = [
            *("chroot", f"--userspec={self.user}:{self.user}", str(self.folder / "merged")),
            *("env", "-i", *self._environment(), "sh", "-c", go, "sh", *command),
        ]
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", _MOUNT, "sh", str(self.folder), *inside],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout}"
        return done.stdout

    def _environment(self) -> list[str]:
        # The settings of pip on this machine, so that it finds its packages.
        of_pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        home = {"HOME": "/root" if self.user == "0" else "/home/train"}
        return [f"{name}={value}" for name, value in (of_pip | home | self.variables).items()]


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def _build(
    text: str, context: Path, folder: Path, arguments: dict[str, str]
) -> tuple[Stage, list[str]]:
    """Run the steps; the last stage, and its command."""
    stages: dict[str, Stage] = {}
    ignored = [
        line.removeprefix("**/")
        for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    ]
    stage, command = None, []
    for instruction, rest in _instructions(text):
        if instruction == "FROM":
            name = rest.partition(" AS ")[2] or "last"
            stages[name] = stage = Stage(folder / name, {})
            continue
        if stage is None:
            assert instruction == "ARG"  # the base image
            continue
        filled = Template(rest).safe_substitute(stage.arguments)
        if instruction == "ARG":
            name, _, value = rest.partition("=")
            stage.arguments[name] = arguments.get(name, value)
        elif instruction == "ENV":
            for word in shlex.split(rest):
                name, _, value = word.partition("=")
                stage.variables[name] = value.replace("$PATH", stage.variables["PATH"])
        elif instruction == "WORKDIR":
            stage.place = rest
            stage.call(["mkdir", "-p", rest])
        elif instruction == "RUN":
            stage.call(["sh", "-c", filled])
        elif instruction == "COPY":
            *sources, target = rest.split()
            if sources[0].startswith("--from="):
                root = stages[sources.pop(0).partition("=")[2]].folder / "upper"
                stage.copy([root / source.lstrip("/") for source in sources], target)
            else:
                stage.copy([context / source for source in sources], target, ignored)
        elif instruction == "USER":
            stage.user = filled
        else:
            assert instruction == "CMD"
            command = json.loads(rest)
    assert stage is not None
    return stage, command


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "stages"
    shutil.rmtree(tmp_path / "stages")  # two gigabytes, which pytest would keep


def test_the_image_trains_as_a_user_without_rights(tmp_path: Path, stages: Path) -> None:
    text = (FOLDER / "Dockerfile").read_text()
    packages = tmp_path / "none"
    packages.mkdir()
    arguments = {"UID": UID, "TORCH_INDEX": packages.as_uri()}
    stage, command = _build(text, ROOT, stages, arguments)
    assert stage.call(["id", "-u"]).strip() == UID
    assert stage.call(["sh", "-c", "touch /workspace/a || echo refused"]).endswith("refused\n")
    out = stage.call(command)
    assert re.search(r"accuracy 9\d\.\d % on 360 images", out), out

    # Both in one root, because two overlays cannot share what they write.
    (stages / "last/upper/etc/hosts").write_text("127.0.0.1 localhost\n127.0.0.2 node-0\n")
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    first, second = (shlex.join(service["command"]) for service in services.values())
    out = stage.call(["sh", "-c", f"{first} & {second} && wait $!"])
    assert out.count("2 ranks on 2 nodes") == 2, out
    assert re.search(r"accuracy 9\d\.\d % on 360 images", out), out
