"""The manifest of a checkpoint: its step, values, layout and digests, as JSON that vouches for itself.

The first field is the SHA-256 of all that follows it, byte by byte, so no flipped bit of the manifest goes
unseen either. What is in it is checked before anything is read by it: files are known names in the same
folder, so no path leads out of it, and there is no place for a pickle.
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
FORMAT = 2
_HEAD = '{"sha256": "'
_BODY_AT = len(_HEAD) + 64
_FILE = re.compile(r"rank-\d{1,6}\.bin")
# By torch's names, with their sizes in bytes.
DTYPES = {
    **dict.fromkeys(["bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"], 1),
    **dict.fromkeys(["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"], 1),
    **dict.fromkeys(["float16", "bfloat16", "int16", "uint16"], 2),
    **dict.fromkeys(["float32", "int32", "uint32", "complex32"], 4),
    **dict.fromkeys(["float64", "int64", "uint64", "complex64"], 8),
    "complex128": 16,
}


class Damaged(Exception):
    """A checkpoint that was committed and is not whole any more."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where its bytes are.

    Args:
        offsets, sizes: The box, one number for each dim.
        file: In the folder of the manifest.
        offset: In the file, in bytes.
        sha256: Of its bytes, in hex.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor of a checkpoint: dtype by torch's name, the shape of the whole, and its boxes."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def size_bytes(self, chunk: Chunk) -> int:
        """How many bytes one of its boxes has."""
        return math.prod(chunk.sizes) * DTYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        world_size: The number of ranks that saved it.
        saved_at: Seconds since 1970.
        versions: Of paceline, torch and python.
        files: Their sizes in bytes.
        tree: The values, as `codec.encode` gives them.
    """

    step: int
    best: bool
    world_size: int
    saved_at: float
    versions: dict[str, str]
    files: dict[str, int]
    tree: Any
    tensors: dict[str, Saved]

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        return sum(self.files.values())

    def render(self) -> str:
        """The text of the file."""
        body = {"paceline": "checkpoint", "format": FORMAT} | {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name != "tensors"
        }
        rows = {
            name: [saved.dtype, saved.shape, [astuple(c) for c in saved.chunks]]
            for name, saved in self.tensors.items()
        }
        text = json.dumps({"": "", **body, "tensors": rows})[len('{"": "') :]
        return f"{_HEAD}{hashlib.sha256(text.encode()).hexdigest()}{text}\n"


def parse(text: str, where: str) -> Manifest:
    """Read a manifest, trusting nothing.

    Raises:
        Damaged: its own digest does not fit.
        CheckpointError: it is not ours, is of a newer format, or names what no checkpoint of ours has.
    """
    digest = hashlib.sha256(text[_BODY_AT:-1].encode()).hexdigest()
    if text[:_BODY_AT] != _HEAD + digest or not text.endswith("}\n"):
        if _is_foreign(text):
            raise _refusal(where, "it is not a manifest of Paceline")
        raise Damaged(f"{NAME} does not have its digest")
    try:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise _refusal(
                where, f"it has format {fields['format']}, and this version reads {FORMAT}"
            )
        return _checked(fields, where)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refusal(where, f"its fields are wrong ({type(error).__name__}: {error})") from error


def _is_foreign(text: str) -> bool:
    """Whether this is somebody else's JSON, rather than ours with an error in it."""
    if text.startswith(_HEAD) or '"paceline": "checkpoint"' in text:
        return False  # one wrong bit is in one of the two at most
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _checked(fields: dict[str, Any], where: str) -> Manifest:
    files = {str(name): int(size) for name, size in fields["files"].items()}
    for name in files:
        if not _FILE.fullmatch(name):
            raise _refusal(where, f"it names the file {name!r}, which is none of a checkpoint's")
    tensors = {}
    for name, (dtype, shape, rows) in fields["tensors"].items():
        if dtype not in DTYPES:
            raise _refusal(where, f"{name} has the dtype {dtype!r}, which is none of torch's")
        chunks = tuple(Chunk(tuple(o), tuple(s), file, at, sha) for o, s, file, at, sha in rows)
        saved = tensors[name] = Saved(dtype, tuple(shape), chunks)
        for chunk in chunks:
            end = chunk.offset + saved.size_bytes(chunk)
            ends = [o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=True)]
            inside = all(e <= n for e, n in zip(ends, saved.shape, strict=True))
            least = min((*chunk.offsets, *chunk.sizes, chunk.offset))
            if least < 0 or not inside or end > files[chunk.file]:
                raise _refusal(where, f"a part of {name} lies outside of the tensor or its file")
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(saved.shape):
            raise _refusal(where, f"the parts of {name} are not the whole of it")
    plain = {name: fields[name] for name in ("step", "best", "world_size", "saved_at")}
    return Manifest(
        **plain, versions=fields["versions"], files=files, tree=fields["tree"], tensors=tensors
    )


def _refusal(where: str, why: str) -> CheckpointError:
    return CheckpointError(f"{where} cannot be read: {why}.", path=where)
