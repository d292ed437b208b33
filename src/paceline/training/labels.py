"""How many targets a batch of labels has, for losses that ignore some of them."""

from __future__ import annotations

import torch


def count_labels(
    labels: torch.Tensor, *, shifted: bool = False, ignore_index: int = -100
) -> torch.Tensor:
    """The number of labels that are not ignored: the count of a mean loss over tokens.

    Args:
        labels: Class indices of any shape; for `shifted`, (..., tokens).
        shifted: Whether the model predicts each token from those before it, as causal language models of
            Hugging Face do. Then the first label of each row is no target.
        ignore_index: The label that the loss ignores.

    Returns:
        An integer tensor of shape (), on the device of the labels.

    Collective: none.
    """
    targets = labels[..., 1:] if shifted else labels
    return (targets != ignore_index).sum()
