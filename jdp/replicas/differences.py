"""Differences: in which leaf, line or element do two processes differ?"""

import zlib

import msgspec
import numpy as np

from jdp.replicas import wire

_BATCH = "batch"  # prefix of the names of arguments that are split over the processes.
WEAK_TYPE = " with weak_type"  # follows dtype and shape of a leaf.
_MOST_TEXT_BYTES = 32 << 20  # longest program; 100,000 lines have 10 MB.


_ONE_TREE = "Build the same tree in every process."
_ABOUT_WEAK_TYPE = (
    "A Python number has a weak_type in JAX, which compiles another program for it. "
    "Pass an array of one dtype in every process, such as `jnp.float32(x)`."
)


class Details(msgspec.Struct, frozen=True):
    """Full description of a program, for finding the difference."""

    leaves: list[tuple[str, str]]  # path; dtype and shape.
    program: bytes  # the jaxpr's text, compressed.


def explain_leaves(ours: Details, theirs: Details, process: int) -> str:
    """Names the first leaf that differs between process 0 and `process`."""
    our_specs, their_specs = dict(ours.leaves), dict(theirs.leaves)
    only_ours = [leaf for leaf in ours.leaves if leaf[0] not in their_specs]
    only_theirs = [leaf for leaf in theirs.leaves if leaf[0] not in our_specs]
    if not only_ours and not only_theirs:
        for (path, spec), (their_path, _) in zip(
            ours.leaves, theirs.leaves, strict=True
        ):
            if their_specs[path] != spec:
                theirs_there = their_specs[path]
                text = (
                    f"`{path}` is not the same on all processes: {spec} on process 0, "
                    f"{theirs_there} on process {process}{_shapes_of(path)}. "
                )
                if spec.removesuffix(WEAK_TYPE) == theirs_there.removesuffix(WEAK_TYPE):
                    return text + _ABOUT_WEAK_TYPE
                return text + "Pass an array of one dtype and shape in every process."
            if their_path != path:
                return (
                    "The processes have their leaves in another order: "
                    f"`{path}` on process 0 is in the place of `{their_path}` on "
                    f"process {process}. Build the tree in one order everywhere."
                )
    head = "The processes do not have the same leaves. "
    if len(our_specs) != len(their_specs):
        head += (
            f"Process 0 has {len(our_specs)} leaves, process {process} has "
            f"{len(their_specs)}. "
        )
    if only_ours and only_theirs:
        (our_path, our_spec), (their_path, their_spec) = only_ours[0], only_theirs[0]
        return (
            f"{head}Only process 0 has `{our_path}` ({our_spec}), only process "
            f"{process} has `{their_path}` ({their_spec}). {_ONE_TREE}"
        )
    owner, (path, spec) = (0, only_ours[0]) if only_ours else (process, only_theirs[0])
    return f"{head}Only process {owner} has `{path}` ({spec}). {_ONE_TREE}"


def _shapes_of(path: str) -> str:
    """Returns a note that a shape is global, for batches, or ""."""
    return " (shapes over all processes)" if path.startswith(_BATCH) else ""


def unpack(data: bytes) -> str:
    """Returns the text that `zlib.compress` has compressed into `data`.

    Raises:
      Malformed: `data` is not compressed text, or too long for a program.
    """
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, _MOST_TEXT_BYTES).decode()
    except (zlib.error, UnicodeDecodeError):
        raise wire.Malformed("A program is not compressed text.") from None
    if not unpacker.eof:
        raise wire.Malformed(
            f"A program is cut off, or longer than {_MOST_TEXT_BYTES:,} bytes."
        )
    return text


def explain_places(ours: Details, theirs: Details, process: int) -> str:
    """Names the first leaf whose placement differs between process 0 and `process`."""
    if not ours.program or not theirs.program:
        return "The processes do not have the same leaves on all replicas."
    our_lines, their_lines = (unpack(d.program).split("\n") for d in (ours, theirs))
    # Both have one line per leaf, unless a message is malformed.
    pairs = zip(our_lines, their_lines, strict=True)
    a, b = next(((a, b) for a, b in pairs if a != b), ("nothing", "nothing"))
    name = a.split(" is ")[0]
    if name == "`process`":
        advice = "Pass one `process` everywhere."
    elif name == "`jax_enable_x64`":
        advice = "Enter `jax.enable_x64` in every process, or in none."
    else:
        advice = (
            "Put the same leaves on the replicas in every process, with "
            "`jdp.replicate`, or in none."
        )
    return (
        f"{a} on process 0, {b.removeprefix(name + ' ')} on process {process}. {advice}"
    )


def explain_programs(ours: Details, theirs: Details, process: int) -> str:
    """Shows the first line in which the programs of two processes differ."""
    head = "The processes traced different programs"
    if not ours.program or not theirs.program:
        return f"{head}: process 0 and process {process} (too long to compare here)."
    our_lines, their_lines = (unpack(d.program).splitlines() for d in (ours, theirs))
    # One text may be a prefix of the other.
    for a, b in zip(our_lines, their_lines, strict=False):
        if a != b:
            return (
                f"{head}. The first line of the jaxpr that differs:\n"
                f"  process 0: {a.strip()}\n  process {process}: {b.strip()}"
            )
    return (
        f"{head}: {len(our_lines)} lines on process 0, {len(their_lines)} on process "
        f"{process}."
    )


def explain_captured(text: str) -> str:
    """Explains that a captured array, which `text` describes, differs."""
    return (
        "An array that the program captures, from outside of the function that is "
        f"traced, is not the same on all processes: {text} Each process would compute "
        "with its own array. Put it into the state, pass it as an argument "
        "(`replicated_argnames`), or create it from the same seed everywhere."
    )


def explain_first_element(
    like: np.ndarray, offset: int, ours: bytes, theirs: bytes, process: int
) -> str:
    """Names the first element that differs between two blocks at byte `offset`."""
    itemsize = like.dtype.itemsize
    for start in range(0, len(ours), itemsize):
        a, b = ours[start : start + itemsize], theirs[start : start + itemsize]
        if a != b:
            position = np.unravel_index((offset + start) // itemsize, like.shape)
            where = f"at {tuple(map(int, position))} " if like.ndim else ""
            values = [np.frombuffer(x, like.dtype)[0] for x in (a, b)]
            if str(values[0]) == str(values[1]):
                values = [
                    f"{v} (0x{x[::-1].hex()})"
                    for v, x in zip(values, (a, b), strict=True)
                ]
            return f"{where}{values[0]} on process 0, {values[1]} on process {process}."
    raise AssertionError("the blocks are equal")
