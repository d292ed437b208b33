"""Tensors as the flat memory that a collective reads and writes, and the checks of their sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]


def _refuse(wrong: bool, why: str) -> None:
    if wrong:
        raise ValueError(f"{why}.")


def check_pieces(pieces: Tensors, own: torch.Tensor, count: int) -> None:
    _refuse(len(pieces) != count, f"got {len(pieces)} tensors for {count} ranks")
    for piece in pieces:
        _refuse(piece.dtype != own.dtype, "the tensors must have one dtype")
        _refuse(piece.numel() != own.numel(), "the tensors must have one size")


def check_whole(whole: torch.Tensor, piece: torch.Tensor, count: int) -> None:
    _refuse(whole.dtype != piece.dtype, "the tensors must have one dtype")
    wrong = whole.numel() != piece.numel() * count
    _refuse(wrong, f"got {whole.numel()} elements for {count} ranks with {piece.numel()} each")


def in_cpu_memory(tensors: Tensors) -> bool:
    return all(t.is_cpu and t.layout == torch.strided and not t.is_quantized for t in tensors)


def is_flat(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def as_flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as one dimension: a view if it is contiguous, else a copy."""
    tensor = tensor.data  # without autograd history and version counter, as in Gloo
    if not is_flat(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def write_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy the elements back if `as_flat` made a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.data.copy_(flat.view(tensor.shape))
