"""What another user of this host can write, and what Paceline does with it."""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.checkpoint.store import open_store
from paceline.errors import ConfigError
from paceline.launch import failure_report
from paceline.launch.nodes import decode_state
from paceline.launch.rendezvous import RendezvousLost
from paceline.machine import private_folder
from paceline.shm import segment
from paceline.shm.segment import SharedMemoryUnavailable, open_segment

NOBODY = 65534
TOKEN = b"12345678"


def _victim(kind: str, path: Path) -> int:
    """A file that is not the memory of rank 0, with the token and the size of one."""
    if kind in ("another memory", "memory of another user"):
        victim = os.memfd_create("other" if kind == "another memory" else "paceline")
    else:
        victim = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.write(victim, TOKEN)
    os.ftruncate(victim, 1 << 24)
    if kind == "memory of another user":
        if os.getuid() != 0:
            pytest.skip("only root can make a file of another user")
        os.fchown(victim, NOBODY, NOBODY)
    if kind == "a deleted file":
        path.unlink()
    return victim


@pytest.mark.parametrize(
    "kind", ["a path", "a file", "a deleted file", "another memory", "memory of another user"]
)
def test_a_rank_writes_only_to_the_memory_of_rank_0(kind: str, tmp_path: Path) -> None:
    victim = _victim(kind, tmp_path / "victim")
    before = os.pread(victim, 1 << 24, 0)
    place = tmp_path / "victim" if kind == "a path" else f"{os.getpid()} {victim}"
    store = dist.HashStore()
    store.set("memory", f"{place} {TOKEN.hex()} {segment._host_id()}")
    store.set("problem/0", '""')
    with pytest.raises(SharedMemoryUnavailable, match="rank 1: "):
        open_segment(store, 1, 2)
    assert os.pread(victim, 1 << 24, 0) == before
    os.close(victim)


class _Pickle:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("data", [None, b"", b"[]", b"{}", b'{"round": "x"}', b"[" * 9999, b"\xff"])
def test_a_state_of_the_nodes_that_is_no_json_of_paceline_is_refused(
    data: bytes | None, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    with pytest.raises(RendezvousLost, match="was not written by this version"):
        decode_state(pickle.dumps(_Pickle(str(victim))) if data is None else data)
    assert not victim.exists()


@pytest.mark.parametrize("kind", ["of another user", "link", "file", "open"])
def test_a_folder_that_another_user_made_is_not_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = tmp_path / f"paceline-{os.getuid()}", tmp_path / "other"
    other.mkdir(mode=0o700)
    if kind == "link":
        folder.symlink_to(other)
    elif kind == "file":
        folder.touch()
    else:
        folder.mkdir(mode=0o700)
    if kind == "open":
        folder.chmod(0o770)
    if kind == "of another user":
        if os.getuid() != 0:
            pytest.skip("only root can make a folder of another user")
        os.chown(folder, NOBODY, NOBODY)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match=f"{folder} is not a folder") as caught:
        private_folder(Path(tempfile.gettempdir()))
    assert "set TMPDIR" in caught.value.fix
    report = Path(failure_report.write([], [], "a rank failed", None))
    assert report.parent == tmp_path
    assert report.stat().st_mode & 0o077 == 0
    assert not list(other.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(other))  # as with TMPDIR, which the fix names
    assert private_folder(Path(tempfile.gettempdir())).is_relative_to(other)


def test_no_name_from_another_rank_leads_out_of_the_folder_of_checkpoints(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run" / "checkpoints")
    attempt = store.scratch("step-1", "/../../../victim")
    with pytest.raises(ValueError, match="leads out of"):
        store.write(f"{attempt}/rank-1.bin", [b"x"])
    assert list(tmp_path.iterdir()) == []
