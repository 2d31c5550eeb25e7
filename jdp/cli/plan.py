"""`jdp plan`: what a loss function's gradients would send, and in which order."""

import importlib
import pathlib
import sys
from typing import Annotated, Any

import jax
import numpy as np
import rich.console
import typer

from jdp import buckets, description, grad_sync, reduction
from jdp.backward import loss as backward_loss
from jdp.recording import Synchronization

_MIB = 1 << 20


def plan(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:LOSS_FN", help="Such as train:loss_fn.")
    ],
    params: Annotated[
        str, typer.Option(help="The parameters: a name in the module, or module:name.")
    ] = "init_params",
    args: Annotated[
        list[str] | None,
        typer.Option(
            help="A further argument of the loss, in order; may be repeated. "
            "[default: example_batch]",
            show_default=False,
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of the job.")] = 2,
    bucket_mib: Annotated[
        float | None, typer.Option(min=0, help="Size of a bucket, in MiB.")
    ] = None,
    first_bucket_mib: Annotated[
        float | None, typer.Option(min=0, help="Size of the first bucket, in MiB.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Shows the buckets of a loss function's gradients in the order sent.

    Parameters and arguments are arrays, `jax.ShapeDtypeStruct`s, trees of them, or
    functions without arguments that return such. Functions are only traced: no array
    is made, and no device is needed.
    """
    sys.path.insert(0, "")
    module, loss_fn = _resolve(target, None)
    values = [
        _abstract(name, _resolve(name, module)[1])
        for name in (params, *(args or ["example_batch"]))
    ]
    try:
        program = backward_loss.trace_abstractly(loss_fn, values[0], tuple(values[1:]))
    except (TypeError, ValueError) as error:
        raise _refused(f"{target}: {error}") from None
    facts = grad_sync.facts_of(program)
    sizes = {
        name: int(mib * _MIB)
        for name, mib in {
            "bucket_bytes": bucket_mib,
            "first_bucket_bytes": first_bucket_mib,
        }.items()
        if mib is not None
    }
    order = facts.timeline.order()
    made = Synchronization(
        plan=(
            buckets.plan_buckets(values[0], order=order, **sizes)
            if sizes
            else reduction.default_plan(values[0], order)
        ),
        packing=reduction.choose_packing(None, None),
        algorithm="psum",
        num_replicas=replicas,
        divide_by=None,
        riders=(buckets.LeafSpec((), np.dtype(program.jaxpr.out_avals[0].dtype)),),
        loss=facts,
    )
    found = description.make_description(target, replicas, [made])
    if json:
        typer.echo(found.to_json())
        return
    rich.console.Console().print(found)


def _resolve(name: str, module: Any) -> tuple[Any, Any]:
    """Returns the module and the object of `module:name`, or of `name` in `module`."""
    path, colon, attribute = name.rpartition(":")
    if colon:
        module = _import(path)
    elif module is None:
        raise _refused(f"{name!r} must be module:function, such as train:loss_fn.")
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise _refused(
                f"Module {module.__name__!r} has no {attribute!r}. The parameters are "
                "named by --params, the further arguments by --args, such as --params "
                "train:make_params."
            )
        found = getattr(found, part)
    return module, found


def _import(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        hint = ""
        if pathlib.Path(path).suffix == ".py":
            hint = f" Write {pathlib.Path(path).stem!r}, without .py."
        raise _refused(f"{error}.{hint}") from None


def _abstract(name: str, value: Any) -> Any:
    try:
        return jax.eval_shape(value if callable(value) else lambda: value)
    except TypeError as error:
        raise _refused(f"{name}: {error}") from None


def _refused(text: str) -> typer.BadParameter:
    return typer.BadParameter(text)
