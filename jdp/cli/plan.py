"""`jdp plan`: what a loss function's gradients would send, and in which order."""

import importlib
import json as json_lib
import pathlib
import sys
from typing import Annotated, Any

import jax
import numpy as np
import rich.console
import typer

from jdp.backward import loss as backward_loss
from jdp.bench import hook_option
from jdp.cli import plan_cluster
from jdp.gradients import differentiation, reduce, reduce_with_hook
from jdp.gradients.step_trace import Synchronization
from jdp.hooks import CommHook
from jdp.step import description
from jdp.trees import buckets

_MIB = 1 << 20


def plan(
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:LOSS_FN", help="Such as train:loss_fn."),
    ] = None,
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
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Replicas of the job. [default: 2]"),
    ] = None,
    bucket_mib: Annotated[
        float | None, typer.Option(min=0, help="Size of a bucket, in MiB.")
    ] = None,
    first_bucket_mib: Annotated[
        float | None, typer.Option(min=0, help="Size of the first bucket, in MiB.")
    ] = None,
    hook: Annotated[str | None, typer.Option(help=hook_option.HELP)] = None,
    gradient_mib: Annotated[
        float | None,
        typer.Option(min=0, help="Gradients in MiB, in place of a loss function."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of a cluster that is not here.")
    ] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, help="Devices of a node. [default: 1]")
    ] = None,
    latency_us: Annotated[
        float | None, typer.Option(min=0, help="Of a message between nodes, in us.")
    ] = None,
    bandwidth_gbps: Annotated[
        float | None,
        typer.Option(min=0, help="Of each device to other nodes, in Gbit/s."),
    ] = None,
    node_latency_us: Annotated[
        float | None,
        typer.Option(min=0, help="Within a node. [default: as between nodes]"),
    ] = None,
    node_bandwidth_gbps: Annotated[
        float | None,
        typer.Option(min=0, help="Within a node. [default: as between nodes]"),
    ] = None,
    compute_ns_per_byte: Annotated[
        float | None,
        typer.Option(min=0, help="To add what arrived, in ns a byte. [default: 0]"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Shows what a loss function's gradients send: buckets, in order.

    Parameters and arguments are arrays, `jax.ShapeDtypeStruct`s, trees of them, or
    functions without arguments that return such. Functions are only traced: no array
    is made, and no device is needed.

    With --nodes, --latency-us and --bandwidth-gbps: also how long the all-reduces of a
    step would take on that cluster, by the cost model, for each algorithm.
    """
    cluster = plan_cluster.make_cluster(
        nodes,
        devices_per_node,
        latency_us,
        bandwidth_gbps,
        node_latency_us,
        node_bandwidth_gbps,
        compute_ns_per_byte,
    )
    if cluster is not None and replicas is not None:
        raise typer.BadParameter(
            "follow from --nodes and --devices-per-node.", param_hint="--replicas"
        )
    if (target is None) == (gradient_mib is None):
        raise typer.BadParameter(
            "name one of MODULE:LOSS_FN and --gradient-mib.",
            param_hint="MODULE:LOSS_FN",
        )
    parsed_hook = None if hook is None else hook_option.parse(hook)
    console = rich.console.Console()
    if target is None:
        if hook is not None:
            raise typer.BadParameter(
                "needs MODULE:LOSS_FN: what a hook sends depends on the shapes.",
                param_hint="--hook",
            )
        if cluster is None:
            raise typer.BadParameter(
                "is for a cluster: name --nodes, --latency-us and --bandwidth-gbps.",
                param_hint="--gradient-mib",
            )
        assert gradient_mib is not None
        buffers = plan_cluster.buffers_of_size(int(gradient_mib * _MIB))
        predicted = plan_cluster.predict_step(buffers, cluster)
        if json:
            typer.echo(json_lib.dumps(predicted, indent=1))
        else:
            console.print(plan_cluster.make_table(predicted))
        return
    num_replicas = cluster.num_replicas if cluster else replicas or 2
    found, made = _describe(
        target,
        params,
        args,
        num_replicas,
        bucket_mib,
        first_bucket_mib,
        parsed_hook,
    )
    if cluster is None:
        if json:
            typer.echo(found.to_json())
        else:
            console.print(found)
        return
    assert made.loss is not None
    buffers = plan_cluster.buffers_of(made.plan, made.loss.never_used)
    predicted = plan_cluster.predict_step(buffers, cluster)
    if json:
        typer.echo(
            json_lib.dumps(
                json_lib.loads(found.to_json()) | {"cluster": predicted}, indent=1
            )
        )
    else:
        console.print(found)
        console.print(plan_cluster.make_table(predicted))


def _describe(
    target: str,
    params: str,
    args: list[str] | None,
    num_replicas: int,
    bucket_mib: float | None,
    first_bucket_mib: float | None,
    hook: CommHook | None,
) -> tuple[description.Description, Synchronization]:
    """Traces a loss, and describes what its gradients send."""
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
    facts = differentiation.facts_of(program)
    sizes = {
        name: int(mib * _MIB)
        for name, mib in {
            "bucket_bytes": bucket_mib,
            "first_bucket_bytes": first_bucket_mib,
        }.items()
        if mib is not None
    }
    order = facts.timeline.order()
    bucket_plan = (
        buckets.plan_buckets(values[0], order=order, **sizes)
        if sizes
        else buckets.default_plan(values[0], order)
    )
    try:
        hook_bytes = reduce_with_hook.hook_bytes(
            hook, bucket_plan, facts.never_used, num_replicas
        )
    except (TypeError, ValueError) as error:  # Of a chain, as it is traced.
        raise typer.BadParameter(str(error), param_hint="--hook") from None
    made = Synchronization(
        plan=bucket_plan,
        packing="flat" if hook else reduce.choose_packing(None, None),
        algorithm="psum",
        hook=None if hook is None else hook.name,
        hook_bytes=hook_bytes,
        num_replicas=num_replicas,
        divide_by=None,
        riders=(buckets.LeafSpec((), np.dtype(program.jaxpr.out_avals[0].dtype)),),
        loss=facts,
    )
    return description.make_description(target, num_replicas, [made]), made


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
