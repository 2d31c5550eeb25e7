"""Mismatch: why can ranks not run what they have submitted under one name?"""

from collections.abc import Collection, Mapping

from jdp.eager.messages import HAS_LOCAL_FIRST, SCALAR, Spec


def explain(name: str, specs: Mapping[int, Spec]) -> str | None:
    """Returns how the specs of a name differ, or None.

    The first difference is reported, in Horovod's order
    (`Controller::ConstructResponse`): dtype, operation, shape, scale factors,
    reduction, root, device; then groups and programs.

    Args:
      name: name of the tensor.
      specs: by rank, more than one; two that differ are named.
    """
    first, *others = specs
    a = specs[first]
    for rank in others:
        b = specs[rank]
        if a == b:
            continue
        what, ours, theirs = _difference(a, b)
        return (
            f"Mismatched {what} of {name!r}: rank {first} has {ours}, but rank {rank} "
            f"has {theirs}."
        )
    return None


def find_fault(name: str, spec: Spec, process_sets: Collection[int]) -> str:
    """Returns why an operation that all ranks agree on cannot run; "" if it can.

    Args:
      name: name of the tensor.
      spec: the same on all ranks.
      process_sets: ids of the sets that exist.
    """
    if spec.kind == "remove_process_set":
        (set_id,) = spec.shape
        if set_id not in process_sets:
            return f"{name!r}: there is no process set {set_id}."
    is_scalar = spec.shape == (() if spec.kind == "reduce_scatter" else SCALAR)
    if is_scalar and spec.kind in (*HAS_LOCAL_FIRST, "reduce_scatter"):
        return f"{spec.kind} of {name!r}: a scalar has no first dimension."
    return ""


def describe_removed(set_id: int, name: str) -> str:
    """Describes why a name of a removed process set does not run."""
    return (
        f"{name!r} was not ready on all ranks of process set {set_id} when that was "
        "removed."
    )


def _difference(a: Spec, b: Spec) -> tuple[str, str, str]:
    """Returns the first property that differs, and both values."""
    if a.dtype != b.dtype:
        return "data types", a.dtype or "none", b.dtype or "none"
    if a.kind != b.kind:
        return "operations", a.kind, b.kind
    if a.shape != b.shape:
        return f"{a.kind} shapes", _shape(a), _shape(b)
    if (a.prescale, a.postscale) != (b.prescale, b.postscale):
        return (
            "prescale and postscale factors",
            f"({a.prescale:g}, {a.postscale:g})",
            f"({b.prescale:g}, {b.postscale:g})",
        )
    if a.op != b.op:
        return "reduction operations", a.op, b.op
    if a.root != b.root:
        return "broadcast root ranks", str(a.root), str(b.root)
    if a.device != b.device:
        return "devices", a.device, b.device
    if (a.group, a.group_size) != (b.group, b.group_size):
        return "groups", _group(a), _group(b)
    return "programs", a.fingerprint, b.fingerprint


def _shape(spec: Spec) -> str:
    """Returns the shape as text; a first dimension that may differ is not shown."""
    if spec.shape == SCALAR:
        return "[]"
    dims = [str(d) for d in spec.shape]
    if spec.kind in HAS_LOCAL_FIRST:
        dims.insert(0, "any")
    return f"[{', '.join(dims)}]"


def _group(spec: Spec) -> str:
    return f"{spec.group!r} of {spec.group_size}" if spec.group else "none"
