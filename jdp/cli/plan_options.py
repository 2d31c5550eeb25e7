"""Plan options: the types and help texts of the options of `jdp plan`."""

import math
from typing import Annotated

import typer

from jdp.bench import hook_option


def _check_finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not finite.")
    return value


Target = Annotated[
    str | None,
    typer.Argument(
        metavar="MODULE:LOSS_FN", help="Loss function, such as train:loss_fn."
    ),
]
Params = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Name of the parameters in the module, or module:name. "
        "[default: init_params]",
    ),
]
Args = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Name of a further argument of the loss; repeat the option for several, "
        "in order. [default: example_batch]",
        show_default=False,
    ),
]
Replicas = Annotated[
    int | None, typer.Option(min=1, help="Number of replicas. [default: 2]")
]
BucketMib = Annotated[
    float | None,
    typer.Option(min=0, callback=_check_finite, help="Bucket size, in MiB."),
]
FirstBucketMib = Annotated[
    float | None,
    typer.Option(
        min=0, callback=_check_finite, help="Size of the first bucket, in MiB."
    ),
]
Hook = Annotated[str | None, typer.Option(help=hook_option.HELP)]
GradientMib = Annotated[
    float | None,
    typer.Option(
        min=0,
        callback=_check_finite,
        help="Size of the gradients in MiB, in place of a loss function.",
    ),
]
Nodes = Annotated[
    int | None, typer.Option(min=1, help="Number of nodes of the predicted cluster.")
]
DevicesPerNode = Annotated[
    int | None, typer.Option(min=1, help="Number of devices per node. [default: 1]")
]
LatencyUs = Annotated[
    float | None,
    typer.Option(
        min=0,
        callback=_check_finite,
        help="Latency of a message between nodes, in microseconds.",
    ),
]
BandwidthGbps = Annotated[
    float | None,
    typer.Option(
        min=0,
        callback=_check_finite,
        help="Bandwidth of each device to other nodes, in Gbit/s.",
    ),
]
NodeLatencyUs = Annotated[
    float | None,
    typer.Option(
        min=0,
        callback=_check_finite,
        help="Latency within a node, in microseconds. [default: as between nodes]",
    ),
]
NodeBandwidthGbps = Annotated[
    float | None,
    typer.Option(
        min=0,
        callback=_check_finite,
        help="Bandwidth within a node, in Gbit/s. [default: as between nodes]",
    ),
]
ComputeNsPerByte = Annotated[
    float | None,
    typer.Option(
        min=0,
        callback=_check_finite,
        help="Time to add a received byte, in nanoseconds. [default: 0]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
