"""The manifest of a checkpoint: its step, values, layout and digests, as JSON with a digest of its own.

The first field is the SHA-256 of everything after it, so a flipped bit of the manifest is found too. No field
holds a pickle, and `Store` refuses a path that leads out of its folder. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import astuple, dataclass
from typing import Any

from paceline.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 3
_HEAD = '{"sha256": "'
_BODY_AT = len(_HEAD) + 64
IN_PARTS = re.compile(r"parts/step-\d+-[0-9a-f]+-\d+", re.ASCII)
# The size of an element of each dtype that can be saved, by torch's name.
ITEM_BYTES = {
    **dict.fromkeys(["bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"], 1),
    **dict.fromkeys(["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"], 1),
    **dict.fromkeys(["float16", "bfloat16", "int16", "uint16"], 2),
    **dict.fromkeys(["float32", "int32", "uint32", "complex32"], 4),
    **dict.fromkeys(["float64", "int64", "uint64", "complex64"], 8),
    "complex128": 16,
}


class Damaged(Exception):
    """A committed checkpoint is not whole any more."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, and where its bytes are.

    Args:
        offsets, sizes: First index and length in each dim.
        file: A file in the folder of the manifest, or in its `parts`.
        offset: First byte in the file.
        sha256: Digest of the bytes, in hex.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint: torch's name of the dtype, the global shape, and its parts."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def whole_bytes(self) -> int:
        """The size of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def size_bytes(self, chunk: Chunk) -> int:
        """The size of one of its chunks."""
        return math.prod(chunk.sizes) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        world_size: The number of ranks that saved it.
        saved_at: Seconds since 1970.
        versions: The versions of paceline, torch and python.
        files: The size of each file in bytes.
        tree: The values, as `codec.encode` returns them.
        parts: The folder of the files, if that is not the folder of the manifest.
        folder: Its folder; not a part of the file.
    """

    step: int
    best: bool
    world_size: int
    saved_at: float
    versions: dict[str, str]
    files: dict[str, int]
    tree: Any
    tensors: dict[str, SavedTensor]
    parts: str = ""
    folder: str = ""

    @property
    def files_in(self) -> str:
        """The folder of the files."""
        return self.parts or self.folder

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(self.files.values())

    def render(self) -> str:
        """The text of the file."""
        body = {"paceline": "checkpoint", "format": FORMAT} | {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("tensors", "folder")
        }
        rows = {
            name: [saved.dtype, saved.shape, [astuple(c) for c in saved.chunks]]
            for name, saved in self.tensors.items()
        }
        # What follows the digest, from its closing quote on.
        text = json.dumps({"": "", **body, "tensors": rows})[len('{"": "') :]
        return f"{_HEAD}{hashlib.sha256(text.encode()).hexdigest()}{text}\n"


def parse(text: str, where: str) -> Manifest:
    """Read the text of a manifest.

    Raises:
        Damaged: it does not match its digest.
        CheckpointError: it is of another program or format, or its fields are invalid.
    """
    digest = hashlib.sha256(text[_BODY_AT:-1].encode()).hexdigest()
    if text[:_BODY_AT] != _HEAD + digest or not text.endswith("}\n"):
        if _is_foreign(text):
            raise _refusal(where, "it is not a manifest of Paceline")
        raise Damaged(f"{NAME} does not match its digest")
    try:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise _refusal(
                where, f"it has format {fields['format']}, and this release reads {FORMAT}"
            )
        return _checked(fields, where)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refusal(where, f"its fields are wrong ({type(error).__name__}: {error})") from error


def _is_foreign(text: str) -> bool:
    """Whether this is JSON of another program, rather than a damaged manifest."""
    if text.startswith(_HEAD) or '"paceline": "checkpoint"' in text:
        return False  # one flipped bit is in at most one of the two
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _checked(fields: dict[str, Any], where: str) -> Manifest:
    files = {str(name): int(size) for name, size in fields["files"].items()}
    parts = fields["parts"]
    if parts and not IN_PARTS.fullmatch(parts):
        raise _refusal(where, f"it names the folder {parts!r}, which is not one of a checkpoint")
    tensors = {}
    for name, (dtype, shape, rows) in fields["tensors"].items():
        if dtype not in ITEM_BYTES:
            raise _refusal(where, f"{name} has the dtype {dtype!r}, which torch does not have")
        chunks = tuple(Chunk(tuple(o), tuple(s), file, at, sha) for o, s, file, at, sha in rows)
        tensors[name] = SavedTensor(dtype, tuple(shape), chunks)
    plain = {name: fields[name] for name in ("step", "best", "world_size", "saved_at")}
    return Manifest(
        **plain,
        versions=fields["versions"],
        files=files,
        tree=fields["tree"],
        tensors=tensors,
        parts=parts,
    )


def _refusal(where: str, why: str) -> CheckpointError:
    return CheckpointError(f"{where} cannot be read: {why}.", path=where)
