"""Checkpoint files: how is one checkpoint written, and is it what was written?

A folder `updates-N` has the arrays, as orbax writes them, and a manifest with a digest
of each array and each file, so orbax never reads damaged files. Arrays without
elements, which orbax refuses, are in the manifest only. The folder gets its name once
all of it is on the disk, the manifest last. A killed process, or a full disk, leaves no
folder of that name.
"""

import contextlib
import errno
import hashlib
import os
import pathlib
import resource
import shutil
import stat
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from jdp.parameter_server import messages, orbax_logs
from jdp.parameter_server.messages import Settled, Version
from jdp.replicas import wire

_FORMAT = 2
_ARRAYS, _MANIFEST = "arrays", "manifest"
_DIGEST_BYTES = 16
_MOST_MANIFEST_BYTES = 256 << 20
_NUM_DESCRIPTORS = 64  # that orbax and tensorstore may open at once.
_Digest = Annotated[str, Meta(min_length=32, max_length=32)]


# A file that is missing or of another kind is damage. Other errors of a disk may pass,
# such as ESTALE, EIO or EMFILE.
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class CheckpointError(RuntimeError):
    """A checkpoint is damaged or incomplete."""


class FormatError(RuntimeError):
    """A checkpoint was written by another version of jdp."""


class _Leaf(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[messages.Count, ...]
    digest: _Digest


class _File(msgspec.Struct, frozen=True, order=True):
    path: str  # below the folder of the arrays.
    num_bytes: messages.Count
    digest: _Digest


class _FormatHeader(msgspec.Struct, frozen=True):
    """The part of a manifest that all formats share."""

    format: int


class Manifest(msgspec.Struct, frozen=True):
    """Contents of a checkpoint; its file begins with a digest of the rest."""

    format: int
    server: messages.Index
    num_servers: messages.Index
    version: Version
    run: str  # names the log of server 0; the same on all servers.
    state: tuple[str, ...]  # names of the arrays, see `Updater.describe`.
    leaves: tuple[_Leaf, ...]
    files: tuple[_File, ...]
    settled: bytes  # the table of pushes, as msgpack.


_header = msgspec.json.Decoder(_FormatHeader)
_manifest = msgspec.json.Decoder(Manifest)
_table = msgspec.msgpack.Decoder(dict[messages.Identity, Settled])


def write(
    folder: pathlib.Path,
    half: pathlib.Path,
    *,
    place: tuple[int, int],
    version: Version,
    arrays: Sequence[np.ndarray],
    settled: dict[bytes, Settled],
    run: str = "",
    state: tuple[str, ...] = (),
) -> None:
    """Writes a checkpoint, whole or not at all.

    Args:
      folder: its name once it is whole.
      half: its name until then, on the same disk.
      place: index of the server, and number of servers.
      version: version of the parameters.
      arrays: arrays of the state.
      settled: outcome of the last push of each session.
      run: as in `Manifest`.
      state: as in `Manifest`.

    Raises:
      OSError: the checkpoint could not be written; nothing of it is left.
    """
    table = msgspec.msgpack.encode(settled)
    try:
        remove(half)
        _check_space(half.parent, sum(x.nbytes for x in arrays) + len(table))
        _check_descriptors()
        half.mkdir()
        _save(half / _ARRAYS, arrays)
        leaves, files = map(_describe, arrays), _find_files(half / _ARRAYS)
        text = msgspec.json.encode(
            Manifest(
                _FORMAT,
                *place,
                version,
                run,
                state,
                tuple(leaves),
                tuple(files),
                table,
            )
        )
        with (half / _MANIFEST).open("wb") as file:
            file.write(_digest(text).encode() + b"\n" + text)
            file.flush()
            os.fsync(file.fileno())
        drop(folder)
        half.rename(folder)
        _sync(folder.parent)
    except BaseException:
        remove(half)
        raise


def read_manifest(folder: pathlib.Path, *, place: tuple[int, int]) -> Manifest:
    """Reads a manifest, whose existence shows that a checkpoint is complete.

    Raises:
      CheckpointError: the manifest is missing, damaged, or from another server.
      FormatError: the checkpoint was written by another version of jdp.
      OSError: the manifest cannot be read now.
    """
    try:
        with (folder / _MANIFEST).open("rb") as file:
            data = file.read(_MOST_MANIFEST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(
            "it has no manifest: it is part of a copy, or of an older jdp"
        ) from None
    except _MISSING as error:
        raise CheckpointError(
            f"its manifest cannot be read: {error.strerror}"
        ) from None
    digest, _, text = data.partition(b"\n")
    if digest != _digest(text).encode():
        raise CheckpointError("its manifest does not have the checksum it begins with")
    try:
        found = wire.decode_with(_header.decode, text).format
        if found != _FORMAT:
            raise FormatError(
                f"`{folder}` is a checkpoint of format {found}, of "
                f"{'a newer' if found > _FORMAT else 'an older'} jdp, and this jdp "
                f"reads format {_FORMAT}"
            )
        manifest = wire.decode_with(_manifest.decode, text)
    except wire.DecodeError as error:
        raise CheckpointError(f"its manifest is invalid: {error}") from None
    if (manifest.server, manifest.num_servers) != place:
        raise CheckpointError(
            f"it belongs to server {manifest.server} of {manifest.num_servers}"
        )
    if folder.name != f"updates-{manifest.version.count}":
        raise CheckpointError(f"it belongs to update {manifest.version.count}")
    return manifest


def read(
    folder: pathlib.Path, *, place: tuple[int, int]
) -> tuple[list[np.ndarray], dict[bytes, Settled]]:
    """Reads the arrays and the table of a checkpoint.

    Raises:
      CheckpointError: something is missing or damaged.
      FormatError: the checkpoint was written by another version of jdp.
      OSError: the checkpoint cannot be read now.
    """
    manifest = read_manifest(folder, place=place)
    _check_files(folder / _ARRAYS, manifest.files)
    _check_descriptors()
    arrays = _restore(folder / _ARRAYS, manifest.leaves)
    for i, (array, leaf) in enumerate(zip(arrays, manifest.leaves, strict=True)):
        if _describe(array) != leaf:
            raise CheckpointError(
                f"array {i}, {leaf.dtype}{list(leaf.shape)}, does not have the "
                "checksum that it was written with"
            )
    try:
        return arrays, wire.decode_with(_table.decode, manifest.settled)
    except wire.DecodeError as error:
        raise CheckpointError(f"its table of pushes is invalid: {error}") from None


def drop(folder: pathlib.Path) -> None:
    """Removes a checkpoint, renamed first: a folder with its name is always whole."""
    dropped = folder.with_name(f"drop-{folder.name}")
    remove(dropped)
    try:
        folder.rename(dropped)
    except OSError:  # It is gone, or the disk cannot be written.
        return
    remove(dropped)


def remove(folder: pathlib.Path) -> None:
    """Removes a folder or file, as far as possible."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            folder.unlink()


def _describe(array: np.ndarray) -> _Leaf:
    # Copies arrays that are not contiguous; dtypes such as bfloat16 have no buffer.
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return _Leaf(str(array.dtype), array.shape, _digest(flat))


def _new_digest(data: Any = b"") -> Any:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES)


def _digest(data: Any) -> str:
    return _new_digest(data).hexdigest()


def _find_files(folder: pathlib.Path) -> list[_File]:
    found = []
    # `Path.rglob` passes over folders that cannot be read.
    for parent, _, names in os.walk(folder, onerror=_raise):
        for path in (pathlib.Path(parent, name) for name in names):
            found_stat = path.stat()
            if not stat.S_ISREG(found_stat.st_mode):
                continue
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, _new_digest).hexdigest()
            name = str(path.relative_to(folder))
            found.append(_File(name, found_stat.st_size, digest))
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


def _check_files(folder: pathlib.Path, wanted: Sequence[_File]) -> None:
    """Raises CheckpointError unless the files are those that were written."""
    try:
        is_there = folder.is_dir()
        found = {f.path: f for f in (_find_files(folder) if is_there else ())}
    except _MISSING as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from None
    for file in wanted:
        other = found.get(file.path)
        if other is None:
            raise CheckpointError(f"its file `{file.path}` is missing")
        if other.num_bytes != file.num_bytes:
            raise CheckpointError(
                f"its file `{file.path}` has {other.num_bytes} bytes, and "
                f"{file.num_bytes} were written"
            )
        if other != file:
            raise CheckpointError(
                f"its file `{file.path}` does not have the checksum that it was "
                "written with"
            )


def _check_space(folder: pathlib.Path, num_bytes: int) -> None:
    """Raises OSError if a disk is full, without the tracebacks that orbax logs."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: {num_bytes / 1e6:.1f} MB are needed and "
            f"{free / 1e6:.1f} free",
        )


def _check_descriptors() -> None:
    """Raises OSError if orbax would run out of descriptors halfway."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = pathlib.Path("/proc/self/fd")
    num_open = len(list(folder.iterdir())) if folder.is_dir() else 0
    if most != resource.RLIM_INFINITY and most - num_open < _NUM_DESCRIPTORS:
        raise OSError(
            errno.EMFILE,
            f"{os.strerror(errno.EMFILE)}: {_NUM_DESCRIPTORS} are needed, "
            f"{num_open} of {most} are open",
        )


def _save(path: pathlib.Path, arrays: Sequence[np.ndarray]) -> None:
    tree = {str(i): x for i, x in enumerate(arrays) if x.size}
    if not tree:
        path.mkdir()
        return
    with orbax_logs.quiet_failures():
        try:
            _open().save(path, tree)
        except OSError as error:
            failure = OSError(error.errno, error.strerror or str(error))
        # Tensorstore has no error class of its own for failures of a disk.
        except (ValueError, RuntimeError) as error:
            failure = OSError(wire.printable(str(error), most=500))
        else:
            return
        raise failure


def _restore(path: pathlib.Path, leaves: Sequence[_Leaf]) -> list[np.ndarray]:
    try:
        is_empty = [0 in leaf.shape for leaf in leaves]
        tree = {} if all(is_empty) else _open().restore(path)
        if len(tree) != is_empty.count(False):
            raise CheckpointError(
                f"it has {len(tree)} arrays, and {is_empty.count(False)} were written"
            )
        return [
            np.empty(leaf.shape, leaf.dtype) if empty else np.asarray(tree[str(i)])
            for i, (leaf, empty) in enumerate(zip(leaves, is_empty, strict=True))
        ]
    except (MemoryError, CheckpointError):
        raise
    # The files are intact. Orbax, tensorstore and zstandard raise undocumented error
    # classes when they cannot read them.
    except Exception as error:
        text = wire.printable(f"{type(error).__name__}: {error}", most=200)
        raise OSError(f"its arrays cannot be read: {text}") from None


def _sync(folder: pathlib.Path) -> None:
    """Waits until names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open() -> Any:
    import orbax.checkpoint

    handler = orbax.checkpoint.PyTreeCheckpointHandler()
    return orbax.checkpoint.Checkpointer(handler)
