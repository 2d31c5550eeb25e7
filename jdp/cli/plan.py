"""`jdp plan`: which buckets would the gradients of a loss send, and in which order?"""

import importlib
import json as json_lib
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import rich.console
import typer

from jdp.backward import loss_queries
from jdp.backward.loss import LossProgram
from jdp.bench import hook_option
from jdp.cli import plan_cluster, plan_options
from jdp.gradients import hook_reduction, step_trace
from jdp.gradients.step_facts import Synchronization
from jdp.hooks import CommHook
from jdp.replicas import axes
from jdp.step import description
from jdp.trees import buckets

_MIB = 1 << 20


def plan(
    target: plan_options.Target = None,
    params: plan_options.Params = None,
    args: plan_options.Args = None,
    replicas: plan_options.Replicas = None,
    bucket_mib: plan_options.BucketMib = None,
    first_bucket_mib: plan_options.FirstBucketMib = None,
    hook: plan_options.Hook = None,
    gradient_mib: plan_options.GradientMib = None,
    nodes: plan_options.Nodes = None,
    devices_per_node: plan_options.DevicesPerNode = None,
    latency_us: plan_options.LatencyUs = None,
    bandwidth_gbps: plan_options.BandwidthGbps = None,
    node_latency_us: plan_options.NodeLatencyUs = None,
    node_bandwidth_gbps: plan_options.NodeBandwidthGbps = None,
    compute_ns_per_byte: plan_options.ComputeNsPerByte = None,
    json: plan_options.Json = False,
) -> None:
    """Show the buckets that the gradients of a loss send, in order.

    Parameters and arguments are arrays, `jax.ShapeDtypeStruct`s, trees of them, or
    functions without arguments that return them. Functions are only traced: no array
    is made, and no device is needed. The module is imported, which runs its top level;
    a line on stderr says so.

    With --nodes, --latency-us and --bandwidth-gbps, the cost model also predicts how
    long the all-reduces of a step take on that cluster, per algorithm.
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
    _check_choice(target, gradient_mib, replicas, cluster)
    parsed_hook = None if hook is None else hook_option.parse(hook)
    sizes = _bucket_sizes(bucket_mib, first_bucket_mib)
    if target is None:
        assert gradient_mib is not None
        _refuse_without_loss({"--params": params, "--args": args, "--hook": hook})
        _show_prediction_of_size(gradient_mib, sizes, cluster, json)
        return
    num_replicas = cluster.num_replicas if cluster else replicas or 2
    names = (params or "init_params", *(args or ["example_batch"]))
    program, tree = _trace(target, *names)
    made = _synchronize(program, tree, sizes, parsed_hook, num_replicas)
    _show(
        description.make_description(target, num_replicas, [made]), made, cluster, json
    )


def _check_choice(
    target: str | None,
    gradient_mib: float | None,
    replicas: int | None,
    cluster: plan_cluster.Cluster | None,
) -> None:
    """Refuses options that exclude each other."""
    if cluster is not None and replicas is not None:
        raise typer.BadParameter(
            "follow from --nodes and --devices-per-node.", param_hint="--replicas"
        )
    if (target is None) == (gradient_mib is None):
        raise typer.BadParameter(
            "name one of MODULE:LOSS_FN and --gradient-mib.",
            param_hint="MODULE:LOSS_FN",
        )


def _refuse_without_loss(given: dict[str, Any]) -> None:
    """Refuses options, by name, that say nothing without a loss."""
    for option, value in given.items():
        if value is None:
            continue
        why = "what a hook sends depends on the shapes."
        if option != "--hook":
            why = "--gradient-mib takes the place of the parameters and arguments."
        raise typer.BadParameter(f"needs MODULE:LOSS_FN: {why}", param_hint=option)


def _show_prediction_of_size(
    gradient_mib: float,
    sizes: dict[str, int],
    cluster: plan_cluster.Cluster | None,
    is_json: bool,
) -> None:
    """Prints the prediction for gradients with a given size."""
    if cluster is None:
        raise typer.BadParameter(
            "is for a cluster: name --nodes, --latency-us and --bandwidth-gbps.",
            param_hint="--gradient-mib",
        )
    buffers = plan_cluster.buffers_of_size(int(gradient_mib * _MIB), **sizes)
    predicted = plan_cluster.predict_step(buffers, cluster)
    if is_json:
        typer.echo(json_lib.dumps(predicted, indent=1))
    else:
        rich.console.Console().print(plan_cluster.make_table(predicted))


def _show(
    found: description.Description,
    made: Synchronization,
    cluster: plan_cluster.Cluster | None,
    is_json: bool,
) -> None:
    """Prints the description, and the prediction for a cluster."""
    predicted = None
    if cluster is not None:
        assert made.loss is not None
        buffers = plan_cluster.buffers_of(made.plan, made.loss.never_used)
        predicted = plan_cluster.predict_step(buffers, cluster)
    if not is_json:
        console = rich.console.Console()
        console.print(found)
        if predicted is not None:
            console.print(plan_cluster.make_table(predicted))
    elif predicted is None:
        typer.echo(found.to_json())
    else:
        both = json_lib.loads(found.to_json()) | {"cluster": predicted}
        typer.echo(json_lib.dumps(both, indent=1))


def _bucket_sizes(
    bucket_mib: float | None, first_bucket_mib: float | None
) -> dict[str, int]:
    """Returns the arguments of `plan_buckets` that were given."""
    given = {"bucket_bytes": bucket_mib, "first_bucket_bytes": first_bucket_mib}
    return {name: int(mib * _MIB) for name, mib in given.items() if mib is not None}


def _trace(target: str, params: str, *args: str) -> tuple[LossProgram, Any]:
    """Traces the loss `target`; returns its program and its abstract parameters."""
    sys.path.insert(0, "")
    module, loss_fn = _resolve(target, None)
    values = [_abstract(name, _resolve(name, module)[1]) for name in (params, *args)]
    try:
        program = loss_queries.trace_abstractly(loss_fn, values[0], tuple(values[1:]))
    except (TypeError, ValueError) as error:
        raise _refused(f"{target}: {error}") from None
    return program, values[0]


def _synchronize(
    program: LossProgram,
    params: Any,
    sizes: dict[str, int],
    hook: CommHook | None,
    num_replicas: int,
) -> Synchronization:
    """Returns the synchronisation that `jdp.value_and_grad` would make of a loss."""
    facts = step_trace.facts_of(program, axes.DEFAULT_AXIS)
    order = facts.timeline.order()
    bucket_plan = (
        buckets.plan_buckets(params, order=order, **sizes)
        if sizes
        else buckets.default_plan(params, order)
    )
    try:
        hook_bytes = 0
        if hook is not None:
            hook_bytes = hook_reduction.hook_bytes(
                hook, bucket_plan, facts.never_used, num_replicas
            )
    except (TypeError, ValueError) as error:  # raised by a chain while it is traced.
        raise typer.BadParameter(str(error), param_hint="--hook") from None
    return Synchronization(
        plan=bucket_plan,
        packing="flat" if hook else buckets.default_packing(),
        algorithm="psum",
        hook=None if hook is None else hook.name,
        hook_bytes=hook_bytes,
        num_replicas=num_replicas,
        divide_by=None,
        riders=(buckets.LeafSpec((), np.dtype(program.jaxpr.out_avals[0].dtype)),),
        loss=facts,
    )


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
    """Imports a module of the user, and says so: its top level may do anything."""
    if path not in sys.modules:
        typer.echo(f"jdp plan: imports {path!r}, whose top level runs.", err=True)
    try:
        return importlib.import_module(path)
    except SystemExit as end:
        raise _refused(
            f"Module {path!r} ended the program when it was imported, with exit code "
            f"{end.code!r}. Put what a script does under "
            '`if __name__ == "__main__":`.'
        ) from None
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
