"""Writes one checkpoint in the background: copy to host memory, write, acknowledge, commit. No collectives.

Ranks acknowledge through a store client of their own, because the training uses the process groups, and its
store client may be in a blocking call. Rank 0 commits once all ranks have written, applies retention, and
publishes the outcome, which is the same on all ranks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import platform
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import paceline
from paceline import log
from paceline.checkpoint.cloud_errors import FIX, StorageError
from paceline.checkpoint.layout import Layout
from paceline.checkpoint.manifest import Chunk, Manifest, SavedTensor
from paceline.checkpoint.owner import Ownership
from paceline.checkpoint.store import Store, commit, is_committed, withdraw
from paceline.credentials import redact
from paceline.errors import CheckpointError
from paceline.job.failures import Peers
from paceline.job.job import Job
from paceline.job.preemption import COMMIT_S, notice

_POLL_S = 0.005
_FIXES = {
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f`, or that of the file system).",
    errno.ENOSPC: "free space there, keep fewer checkpoints, or choose another folder.",
    errno.EDQUOT: "free space within the quota, or raise it.",
    errno.EACCES: "give the job permission to write there.",
    errno.EROFS: "choose a folder that is mounted for writing.",
}
_LATE_S = 60.0  # of a save: rank 0 warns at this age, and whenever the age has doubled


class Buffer:
    """Host memory that is kept between saves: allocating it costs more than copying into it."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Shape (size_bytes,), uint8. The content of the last save is overwritten."""
        if len(self._bytes) < size_bytes or self._bytes.is_pinned() != pinned:
            self._bytes = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._bytes[:size_bytes]


class Staging:
    """The copy of this rank's share of a save in host memory.

    Attributes:
        bytes: The rank's file, shape (layout.size_bytes,).
    """

    def __init__(self, layout: Layout, tensors: dict[str, torch.Tensor], buffer: Buffer) -> None:
        self.layout = layout
        pinned = any(tensor.device.type == "cuda" for tensor in tensors.values())
        self.bytes = buffer.of(layout.size_bytes, pinned=pinned)
        for piece in layout.mine:
            source = piece.of(tensors[piece.name])
            if source.numel():
                target = self.bytes[piece.offset : piece.offset + piece.size_bytes]
                target.view(piece.dtype).view(source.shape).copy_(source)

    def non_finite(self, names: Collection[str]) -> str | None:
        """The first of these tensors that holds NaN or infinity in this rank's share."""
        for piece in self.layout.mine:
            is_floating = piece.dtype.is_floating_point or piece.dtype.is_complex
            if piece.name in names and is_floating and piece.size_bytes:
                part = self.bytes[piece.offset : piece.offset + piece.size_bytes]
                values = part.view(piece.dtype)
                if piece.dtype.is_complex:
                    values = torch.view_as_real(values)
                # A finite sum proves that all values are finite, and allocates nothing. It may overflow.
                is_finite = values.sum(dtype=torch.float64).isfinite()
                if not is_finite and not values.double().isfinite().all():
                    return piece.name
        return None


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """How a save ended.

    Args:
        kind: "saved", "disk" (the storage failed), "non-finite" or "other".
        text: What happened, if it was not saved.
        rank: The rank where it happened.
        fix: What to do, if that is known.
        size_bytes: What all ranks write together.
    """

    kind: str
    text: str = ""
    rank: int = 0
    fix: str = ""
    size_bytes: int = 0


class _Cancelled(Exception):
    """The job is being abandoned."""


def _failed(error: Exception) -> SaveOutcome:
    """The outcome of a save that raised `error`."""
    kind = "disk" if isinstance(error, OSError) else "other"
    if isinstance(error, StorageError):
        return SaveOutcome(kind=kind, text=str(error), fix=FIX)
    if isinstance(error, CheckpointError):
        return SaveOutcome(kind=kind, text=error.what.removesuffix("."), fix=error.fix)
    fix = _FIXES.get(getattr(error, "errno", 0), "")
    return SaveOutcome(kind=kind, text=redact(f"{type(error).__name__}: {error}"), fix=fix)


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a save writes, apart from tensors.

    Args:
        attempt: Equal on all ranks, and different for each save.
        tree: The values for JSON; those of rank 0 are written.
        finite: Names of tensors that must be finite.
    """

    step: int
    attempt: str
    best: bool
    tree: Any
    finite: Collection[str]


class Save:
    """A save in flight, with its thread. All ranks create one for the same step.

    Args:
        ownership: Of the folder, on rank 0; None on the others.
        prune: Applies retention; called on rank 0 after the commit.

    Attributes:
        outcome: None while it is in flight, and if it was cancelled.
        took_s: How long it took, when it has ended.
    """

    def __init__(
        self,
        job: Job,
        store: Store,
        content: Content,
        staging: Staging,
        *,
        ownership: Ownership | None,
        prune: Callable[[], None],
    ) -> None:
        self.step, self.best = content.step, content.best
        self._content = content
        self._staging = staging
        self.outcome: SaveOutcome | None = None
        self._began = time.monotonic()
        self.took_s = 0.0
        self._rank, self._world_size = job.rank, job.world_size
        self._keys = [f"{rank}" for rank in range(job.world_size)]  # of the acknowledgements
        self._store = store
        self._scratch = store.scratch(f"step-{content.step}", content.attempt)
        self._ownership = ownership
        self._prune = prune
        self._cancel = threading.Event()
        self._has_written = False
        self._acks: dist.Store | None = None
        # Where failed ranks leave a mark. None if this save comes after a failure, whose mark is there.
        self._marks: dist.Store | None = None
        if job.store is not None:
            own_client: dist.Store = job.store.clone()  # type: ignore[attr-defined] # not in torch's stubs
            # Counted for the job, because it may have several `Checkpoints`. All ranks count alike.
            number = job.store.add(f"checkpoint/saves/{job.rank}", 1)
            self._acks = dist.PrefixStore(f"checkpoint/{number}", own_client)
            self._marks = None if job.peers is None else own_client
        self._thread = threading.Thread(target=self._run, name="paceline-save", daemon=True)
        notice.commits.add(self.finish_commit)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether its thread has ended."""
        return not self._thread.is_alive()

    def wait(self) -> SaveOutcome | None:
        """Return when it has ended."""
        self._thread.join()
        return self.outcome

    def wait_until_aged(self, age_s: float) -> bool:
        """Whether it has ended; wait for it until it is `age_s` old."""
        self._thread.join(timeout=max(0.0, self._began + age_s - time.monotonic()))
        return self.is_done

    def finish_commit(self) -> bool:
        """Wait for the commit if this rank makes it and all ranks have written; whether that is so."""
        # A forked process has this object without the thread.
        if self._rank > 0 or not self._has_written or not self._thread.is_alive():
            return False
        try:
            if self._acks is not None and not self._acks.check(self._keys):
                return False
        except RuntimeError:
            return False  # the job's store ended with its host
        self._thread.join(timeout=COMMIT_S)
        return True

    def cancel(self) -> None:
        """Give up without waiting for other ranks; if they all have written, commit first."""
        if not self.finish_commit():
            self._cancel.set()
            self._thread.join(timeout=COMMIT_S)

    def _run(self) -> None:
        try:
            own = self._write_own()
            self._has_written = True
            self.outcome = self._conclude(own)
        except _Cancelled:
            return
        except RuntimeError as error:  # the job's store ended with rank 0
            self.outcome = SaveOutcome(kind="other", text=f"the job's store is gone: {error}")
        except Exception as error:  # None would mean "cancelled"
            self.outcome = _failed(error)
        finally:
            self.took_s = time.monotonic() - self._began
            notice.commits.discard(self.finish_commit)

    def _write_own(self) -> dict[str, Any]:
        """This rank's acknowledgement: its digests, or why there are none."""
        try:
            name = self._staging.non_finite(frozenset(self._content.finite))
            if name is not None:
                return {"kind": "non-finite", "text": name}
            digests: list[str] = []
            if self._staging.layout.mine:
                self._store.write(f"{self._scratch}/rank-{self._rank}.bin", self._parts(digests))
        except _Cancelled:
            raise
        except Exception as error:
            failed = _failed(error)
            size = self._staging.layout.size_bytes
            return {"kind": failed.kind, "text": failed.text, "fix": failed.fix, "size": size}
        boxes = [[*p.box, p.offset] for p in self._staging.layout.mine]
        names = [p.name for p in self._staging.layout.mine]
        return {
            "kind": "saved",
            "size": self._staging.layout.size_bytes,
            "chunks": list(zip(names, boxes, digests, strict=True)),
        }

    def _parts(self, digests: list[str]) -> Iterator[memoryview]:
        whole = memoryview(self._staging.bytes.numpy().data)
        for piece in self._staging.layout.mine:
            if self._cancel.is_set():
                raise _Cancelled
            part = whole[piece.offset : piece.offset + piece.size_bytes]
            digests.append(hashlib.sha256(part).hexdigest())
            yield part

    def _conclude(self, own: dict[str, Any]) -> SaveOutcome:
        if self._acks is None:
            return self._commit([own])
        self._acks.set(f"{self._rank}", json.dumps(own))
        if self._rank == 0:
            self._await(self._keys)
            if self._cancel.is_set():
                raise _Cancelled
            outcome = self._commit([json.loads(self._acks.get(key)) for key in self._keys])
            for key in self._keys:
                self._acks.delete_key(key)
            self._acks.set("outcome", json.dumps(asdict(outcome)))
            return outcome
        self._await(["outcome"])
        return SaveOutcome(**json.loads(self._acks.get("outcome")))

    def _await(self, keys: list[str]) -> None:
        """Wait until all keys are set, however slow a rank's storage is, unless a rank has failed."""
        assert self._acks is not None
        warn_at_s, pause_s = _LATE_S, _POLL_S
        while not self._acks.check(keys):
            if self._cancel.wait(pause_s):
                raise _Cancelled
            # A rank that failed because of this save has given the outcome before.
            has_failed = self._marks is not None and Peers.has_failure(self._marks)
            if has_failed and not self._acks.check(keys):
                raise _Cancelled
            pause_s = min(2 * pause_s, 0.1)
            age_s = time.monotonic() - self._began
            if self._rank == 0 and age_s > warn_at_s:
                warn_at_s *= 2
                late = [key for key in keys if not self._acks.check([key])]
                text = "the checkpoint of step %d is not saved after %.0f s: rank %s still writes to %s."
                log.logger.warning(text, self.step, age_s, ", ".join(late), self._store.root)

    def _commit(self, acks: list[dict[str, Any]]) -> SaveOutcome:
        """Commit what all ranks have written, or say why not. The other ranks wait for the outcome."""
        try:
            outcome, may_remove = self._commit_or_fail(acks)
        except Exception as error:
            outcome, may_remove = _failed(error), False
        if outcome.kind != "saved":
            outcome = replace(outcome, size_bytes=sum(ack.get("size", 0) for ack in acks))
            try:
                if may_remove:
                    self._store.remove(self._scratch)  # no rank writes any more
            except Exception as error:
                log.logger.info("%s stays until the next start: %s", self._scratch, error)
            return outcome
        try:
            self._prune()
        except Exception as error:
            log.logger.warning("step %d is saved, but older ones stay: %s", self.step, error)
        return outcome

    def _commit_or_fail(self, acks: list[dict[str, Any]]) -> tuple[SaveOutcome, bool]:
        """The outcome, and if it is a failure whether no manifest names the files of this attempt."""
        for rank, ack in enumerate(acks):
            if ack["kind"] != "saved":
                own = {name: value for name, value in ack.items() if name != "size"}
                return SaveOutcome(**own, rank=rank), True
        assert self._ownership is not None
        manifest = self._manifest(acks)
        try:
            self._ownership.check()
            commit(self._store, manifest, self._scratch)
        except Exception as error:
            # The storage may have done what it reports as failed.
            if not is_committed(self._store, manifest):
                return _failed(error), True
            log.logger.info("step %d is saved, although the storage reported: %s", self.step, error)
        try:
            self._ownership.check()
        except CheckpointError as error:
            withdraw(self._store, manifest)
            return _failed(error), True
        except OSError as error:
            log.logger.warning("step %d is saved, but the owner is unknown: %s", self.step, error)
        return SaveOutcome(kind="saved"), False

    def _manifest(self, acks: list[dict[str, Any]]) -> Manifest:
        shapes = self._staging.layout.shapes
        chunks: dict[str, list[Chunk]] = {name: [] for name in shapes}
        for rank, ack in enumerate(acks):
            for name, (offsets, sizes, at), digest in ack["chunks"]:
                chunk = Chunk(tuple(offsets), tuple(sizes), f"rank-{rank}.bin", at, digest)
                chunks[name].append(chunk)
        return Manifest(
            step=self.step,
            folder=f"step-{self.step}",
            best=self._content.best,
            world_size=self._world_size,
            saved_at=time.time(),
            versions={
                "paceline": paceline.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            files={f"rank-{r}.bin": ack["size"] for r, ack in enumerate(acks) if ack["chunks"]},
            tree=self._content.tree,
            parts="" if self._store.has_rename else self._scratch,
            tensors={n: SavedTensor(*shapes[n], tuple(found)) for n, found in chunks.items()},
        )
