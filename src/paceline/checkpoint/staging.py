"""This rank's share of a save, copied to host memory that is used again for the next one.

What the optimizer alone changes is copied by a thread during the next forward and backward; the rest, and
everything where the caller names nothing as steady, before `Staging` returns.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection

import torch

from paceline.checkpoint.layout import Layout, Piece, local


class Buffer:
    """Host memory that stays: fresh memory costs more than copying into it does."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
        """So many bytes, shape (size_bytes,); what was there before is lost."""
        if len(self._bytes) < size_bytes or self._bytes.is_pinned() != pinned:
            self._bytes = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._bytes[:size_bytes]


class Staging:
    """One save's copy.

    Args:
        steady: Tensors that nobody changes until `wait` has returned; they are copied by `finish`.

    Attributes:
        bytes: The rank's file, shape (layout.size_bytes,), once `finish` has returned.
        cpu_s: What `finish` took, in seconds of this process's time.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: dict[str, torch.Tensor],
        steady: Collection[torch.Tensor],
        buffer: Buffer,
    ) -> None:
        self.layout = layout
        self.device = next(
            (t.device for t in tensors.values() if t.device.type != "cpu"), torch.device("cpu")
        )
        self.bytes = buffer.of(layout.size_bytes, pinned=self.device.type == "cuda")
        self.changed: str | None = None
        self._done = threading.Event()
        # `state_dict` gives other objects on the same data.
        known = {_identity(t) for t in steady}
        late: list[tuple[Piece, torch.Tensor]] = []
        for piece in layout.mine:
            tensor = tensors[piece.name]
            if _identity(tensor) in known:
                late.append((piece, tensor))
            else:
                self._copy(piece, tensor)
        self._late = late
        self._versions = [local(tensor)._version for _, tensor in late]
        self._event = None
        if late and self.device.type != "cpu":
            # The copy must see what has been queued until now, and may overlap what comes.
            module = torch.get_device_module(self.device)
            self._event = module.current_stream(self.device).record_event()

    def _copy(self, piece: Piece, tensor: torch.Tensor) -> None:
        source = piece.of(tensor)
        if source.numel():
            place = self.bytes[piece.offset : piece.offset + piece.size_bytes]
            place.view(piece.dtype).view(source.shape).copy_(source)

    def finish(self) -> None:
        """Copy what is steady; for the writer's thread."""
        side = contextlib.nullcontext()
        if self._event is not None:
            module = torch.get_device_module(self.device)
            stream = module.Stream(self.device)
            stream.wait_event(self._event)
            side = module.stream(stream)
        try:
            with side, torch.no_grad():
                for piece, tensor in self._late:
                    self._copy(piece, tensor)
            for (piece, tensor), version in zip(self._late, self._versions, strict=True):
                if local(tensor)._version != version:
                    self.changed = piece.name
        finally:
            self._late = []
            self._done.set()

    def wait(self) -> None:
        """Until everything is copied."""
        self._done.wait()

    def non_finite(self, prefix: str) -> str | None:
        """The first tensor of that prefix with NaN or infinity in this rank's share."""
        for piece in self.layout.mine:
            if piece.name.startswith(prefix) and piece.dtype.is_floating_point and piece.size_bytes:
                values = self.bytes[piece.offset : piece.offset + piece.size_bytes].view(
                    piece.dtype
                )
                # A sum is finite only if all are, reads them once, and needs no memory; it may
                # overflow, so only where it is not finite are they looked at one by one.
                total = values.sum(dtype=torch.float64)
                if not bool(torch.isfinite(total)) and not bool(
                    torch.isfinite(values.float()).all()
                ):
                    return piece.name
        return None


def _identity(tensor: torch.Tensor) -> tuple[int, int]:
    own = local(tensor)
    return own.data_ptr(), own.numel()
