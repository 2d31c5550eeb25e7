"""Processes of `jdp bench eager` that run Horovod: what do they time?"""

import sys

import horovod.torch as hvd
import torch

from jdp.bench import channel, named_calls


def main(port: int, num_names: int, variants: tuple[str, str, str]) -> None:
    """Runs one process; `variants` are for one name, for many, and for new ones."""
    hvd.init()
    torch.set_num_threads(1)
    elements = [torch.zeros(1) for _ in range(num_names)]
    one = named_calls.repeating(lambda: hvd.allreduce_(elements[0], name="one"))
    many, new = named_calls.make_runners(
        lambda x, name: hvd.allreduce_async_(x, name=name), hvd.synchronize, elements
    )
    runners = dict(zip(variants, (one, many, new), strict=True))
    channel.serve(port, "Horovod", hvd.rank(), runners)
    hvd.shutdown()


if __name__ == "__main__":
    driver_port, count, first, second, third = sys.argv[1:]
    main(int(driver_port), int(count), (first, second, third))
